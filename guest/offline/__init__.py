"""Stands before what cannot work without a network. Code finds this directory on PYTHONPATH."""
