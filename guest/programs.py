"""What all that starts programs needs: their standard input, their signals, and the name of one that ended them."""

import os
import signal
from contextlib import suppress

# Python ignores the first two, whoever starts the agent in the background the others, and so would what is started by
# them: a program is to find them as it does everywhere else.
DEFAULT_SIGNALS = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGQUIT)


def reset_signals() -> None:
    """In a process that is about to become a program."""
    for number in DEFAULT_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def signal_name(number: int) -> str:
    """A signal as people call it."""
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"SIG{number}"


def as_file(data: bytes) -> int:
    """A descriptor to read `data` from: nobody has to stand by and write."""
    if not data:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    fd = os.memfd_create("stdin")
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
