"""One module a kind of kernel: the process in the machine that runs code."""
