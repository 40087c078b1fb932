"""Where machines come from."""
