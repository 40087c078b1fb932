"""Serves the host on a listening socket, one connection at a time: the last one that it opened.

A machine that was restored from a snapshot may still have the connection of the machine that was saved, whose end no
monitor may ever report. So a new connection replaces the one before.

On vsock only the host may connect.
"""

import socket

from guest.agent.loop import Link, Loop


def listen_on_vsock(port: int) -> socket.socket:
    """Return a socket that the host can connect to, whatever context id this machine has."""
    listening = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
    listening.bind((socket.VMADDR_CID_ANY, port))
    listening.listen()
    return listening


class Listener:
    """Attaches the link to one connection after the other."""

    def __init__(self, loop: Loop, listening: socket.socket, link: Link) -> None:
        self._listening = listening
        self._link = link
        listening.setblocking(False)
        loop.add(listening.fileno(), self._accept)

    def next(self) -> None:
        """Wait for the next connection; the last one has ended."""
        self._link.close()

    def _accept(self, _events: int = 0) -> None:
        while True:
            try:
                connection, address = self._listening.accept()
            except BlockingIOError:
                return
            except ConnectionError:  # it was closed before it was accepted
                continue
            if self._listening.family == socket.AF_VSOCK and address[0] != socket.VMADDR_CID_HOST:
                connection.close()  # code in this machine, over vsock loopback
                continue
            self._link.close()
            fd = connection.detach()
            self._link.attach((fd, fd))
