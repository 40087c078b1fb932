"""Sandboxes: their life, runs, files, forks and limits."""
