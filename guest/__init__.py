"""What runs inside a machine, and the wire to it."""
