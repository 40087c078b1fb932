"""What owners have: sandboxes, their lives and their files."""
