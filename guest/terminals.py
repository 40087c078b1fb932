"""Terminals in a machine: what both ends agree on.

The request `terminal` opens one and is answered when its shell has ended. Until then its events are

    output   the body has bytes that programs wrote
    window   the terminal has taken `bytes` of input, or the first time has room for as many: the host may send them

and the host sends further requests, which name it by the id of the first one as `terminal`:

    terminal_input    the body has bytes that were typed
    terminal_window   the host has used `bytes` of output: the machine may send as many more
    terminal_resize   the terminal has `columns` and `rows` now
    terminal_close    hang up: its programs get SIGHUP, and what is left soon after is killed
"""

OUTPUT_WINDOW = 256 * 1024  # bytes of output that may wait at the host
INPUT_WINDOW = 64 * 1024  # bytes of input that may wait in the machine
CHUNK = 32 * 1024  # bytes of one frame
MAX_TERMINALS = 8  # open at the same time in one machine
MAX_SIDE = 1000  # columns or rows
MAX_TERM = 64  # characters of the variable TERM
