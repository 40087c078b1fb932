"""Serves the host on a listening socket, one connection at a time.

On vsock only the host may connect. That is untested: no development machine had vhost-vsock or vsock loopback. The
rest is tested with another kind of socket.
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
        """Take the next connection, which may be waiting already; the last one has ended."""
        self._link.close()
        self._accept()

    def _accept(self, _events: int = 0) -> None:
        while self._link.closed:
            try:
                connection, address = self._listening.accept()
            except BlockingIOError:
                return
            except ConnectionError:  # it was closed before it was accepted
                continue
            if self._listening.family == socket.AF_VSOCK and address[0] != socket.VMADDR_CID_HOST:
                connection.close()  # code in this machine, over vsock loopback
                continue
            fd = connection.detach()
            self._link.attach((fd, fd))
