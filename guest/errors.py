"""Everything that can go wrong on the wire between a host and the agent in its machine.

GuestError
├── ProtocolError    the peer broke the protocol, by malice or by bug: the machine must be destroyed
├── AgentGone        the stream ended: the machine, or its agent, is gone
├── AgentTimeout     the agent did not answer in time: what it did is unknown
└── RequestRefused   the agent understood and said no; the machine is fine
"""


class GuestError(Exception):
    """Base of all errors this room raises."""


class ProtocolError(GuestError):
    """The peer sent something no honest peer sends. Nothing it said or will say can be trusted."""


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
