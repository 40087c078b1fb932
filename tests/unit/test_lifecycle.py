"""States of a sandbox, legal moves between them, and lifespans."""

from itertools import product

import pytest

from mcp_sandbox.config import Settings
from mcp_sandbox.errors import BadRequest
from mcp_sandbox.sandboxes.lifecycle import ALIVE, MOVES, OVER, USABLE, IllegalMove, Lifespan, State, lifespan, moved


def test_every_move_is_legal_or_raises():
    legal = {(old, new) for old, new in product(State, State) if new in MOVES[old]}
    for old, new in product(State, State):
        if (old, new) in legal:
            assert moved(old, new) is new
        else:
            with pytest.raises(IllegalMove, match=f"{old} to {new}"):
                moved(old, new)


def test_a_sandbox_that_is_over_never_returns_and_every_state_can_end():
    assert all(MOVES[state] <= OVER for state in OVER)
    assert all(MOVES[state] & OVER for state in State if state not in (State.CLOSED, State.LOST))


def test_every_state_is_creating_alive_or_over():
    assert set(State) - ALIVE - OVER == {State.CREATING}
    assert not ALIVE & OVER
    assert USABLE | {State.PAUSED} == ALIVE


def test_use_restarts_the_idle_timeout_but_not_the_maximum_age():
    span = Lifespan(idle_s=10, ttl_s=25)
    assert span.ends_at(created=0, idle_since=0) == (10, "it was idle for 10 s")
    assert span.ends_at(created=0, idle_since=9)[0] == 19
    assert span.ends_at(created=0, idle_since=20) == (25, "it reached its maximum age of 25 s")


def test_a_lifespan_within_the_limits_can_be_requested():
    settings = Settings(lifetime={"idle_s": 5, "max_idle_s": 50, "max_age_s": 100})
    assert lifespan(settings.lifetime, None, None) == Lifespan(idle_s=5, ttl_s=100)
    assert lifespan(settings.lifetime, 30, 50) == Lifespan(idle_s=50, ttl_s=30)
    for ttl_s, idle_s, words in ((101, None, "ttl_s .* at most 100"), (None, 51, "idle_s .* 50"), (0, None, "ttl_s")):
        with pytest.raises(BadRequest, match=words):
            lifespan(settings.lifetime, ttl_s, idle_s)
