"""Modules in front of those that cannot work without a network. This directory is on the PYTHONPATH of code."""
