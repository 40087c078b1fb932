"""What to raise when a group of tasks fails: one error, as it is."""

from collections.abc import Iterator


def first_error(error: BaseException) -> BaseException:
    """The error that ended a group of tasks, or the error itself; the others are told in its notes."""
    first, *others = _leaves(error)
    for other in others:
        if other is not first:
            first.add_note(f"{other!r} happened beside it")
    return first


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
