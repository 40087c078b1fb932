"""A small web on this machine, for tests of everything that reaches the network."""
