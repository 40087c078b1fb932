"""Who may use a shared server."""
