"""Reaches the web for the host, inside a machine: `python -m guest.web` is the service of the template websearch-tools.

The only part of the guest that uses more than the standard library: its libraries are wheels of that template.
"""
