"""Serves the host on a listening socket: one connection at a time, all with one link.

On vsock only the host is let in. That was not seen at work: the machines this was written on had neither vhost-vsock
nor vsock loopback. The rest is the same for every kind of socket, and tested with another.
"""

import socket

from guest.agent.loop import Link, Loop


def listen_on_vsock(port: int) -> socket.socket:
    """A socket that the host can connect to, under whatever number it knows this machine."""
    listening = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
    listening.bind((socket.VMADDR_CID_ANY, port))
    listening.listen()
    return listening


class Listener:
    """Attaches the link to a connection, and to the next one when that has ended."""

    def __init__(self, loop: Loop, listening: socket.socket, link: Link) -> None:
        self._listening = listening
        self._link = link
        listening.setblocking(False)
        loop.add(listening.fileno(), self._accept)

    def next(self) -> None:
        """The connection has ended: take the next one, which may be waiting already."""
        self._link.close()
        self._accept()

    def _accept(self, _events: int = 0) -> None:
        while self._link.closed:
            try:
                connection, address = self._listening.accept()
            except BlockingIOError:
                return
            except ConnectionError:  # it was given up before it was accepted
                continue
            if self._listening.family == socket.AF_VSOCK and address[0] != socket.VMADDR_CID_HOST:
                connection.close()  # code in the machine, by way of a loopback
                continue
            fd = connection.detach()
            self._link.attach((fd, fd))
