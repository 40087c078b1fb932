"""The errors of the wire between a host and the agent in a machine.

GuestError
├── ProtocolError    the peer broke the protocol, by malice or by bug: the machine must be destroyed
├── AgentGone        the stream ended: the machine, or its agent, is gone
├── AgentTimeout     the agent did not answer in time: what it did is unknown
└── RequestRefused   the agent understood and said no; the machine is fine
"""

from collections.abc import Iterator


class GuestError(Exception):
    """Base of all errors that this package raises."""


class ProtocolError(GuestError):
    """The peer sent something that no honest peer sends. Nothing it has sent or will send can be trusted."""


class AgentGone(GuestError):
    """The stream to the agent ended."""


class AgentTimeout(GuestError):
    """The agent did not answer in time."""


class RequestRefused(GuestError):
    """The agent refused one request.

    `code` is one of not_found, is_directory, not_a_file, no_space, denied, too_large, busy, bad_request,
    no_kernel (the process that runs code could not be started in this machine).
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def first_error(error: BaseException) -> BaseException:
    """Return the first error in a group of errors, or the error itself. The others become notes of the first."""
    first, *others = _leaves(error)
    for other in others:
        if other is not first:
            first.add_note(f"{other!r} was raised as well")
    return first


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
