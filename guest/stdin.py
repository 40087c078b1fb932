"""Open standard input of runs: what both ends agree on.

A `run` request with `stdin_open` gets one. Its events then include

    window   the run has taken `bytes` of input, or the first time has room for as many: the host may send them

and the host sends requests `stdin`, which name the run by the id of its request: the body has input, and `end` says
that no more comes. A kernel finds the path of a FIFO in its order as `stdin`.
"""

WINDOW = 64 * 1024  # bytes of input that may wait in the machine, besides what a pipe holds
CHUNK = 32 * 1024  # bytes of one frame
