"""The web behind a guarded bridge: what sandboxes may reach, and how."""
