"""Network mode `nat`: a device for a machine, behind the host's address, and the rules about what it reaches."""
