"""The server on the wire."""
