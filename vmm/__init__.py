"""How a machine runs: drivers behind one protocol."""
