"""Tokens: what the registry keeps of them, and when they open a server."""

import hashlib
import sqlite3
import time
from contextlib import closing

import pytest

from mcp_sandbox.accounts.tokens import PREFIX, SCHEMA, BadTokenName, TokenExists, TokenNotFound, Tokens
from mcp_sandbox.operating.database import FILE, connect
from mcp_sandbox.sandboxes.admission import Quota


@pytest.fixture
def tokens(tmp_path):
    opened = Tokens(tmp_path)
    yield opened
    opened.close()


def test_a_token_is_found_by_its_secret(tokens):
    secret = tokens.create("ana", requests_per_minute=7)
    found = tokens.find(secret)
    assert (found.name, found.scopes, found.requests_per_minute) == ("ana", ("use",), 7)


def test_a_token_has_the_owner_scopes_and_quotas_it_was_made_with(tokens):
    quota = Quota(sandboxes=2, memory_mb=1024, runs=1)
    found = tokens.find(tokens.create("ana's dashboard", ("read", "operate"), owner="ana", quota=quota))
    assert (found.owner, found.scopes, found.quota) == ("ana", ("read", "operate"), quota)


def test_a_token_is_its_own_owner_unless_it_was_made_for_another(tokens):
    assert tokens.find(tokens.create("ana")).owner == "ana"


def test_tokens_of_a_registry_from_before_quotas_still_open_the_server(tmp_path):
    with closing(connect(tmp_path)) as old:
        old.executescript(SCHEMA)
        secret = f"{PREFIX}old"
        row = ("ana", hashlib.sha256(secret.encode()).digest(), '["use"]', 1.0)
        old.execute("INSERT INTO tokens (name, hash, scopes, created) VALUES (?, ?, ?, ?)", row)
    with closing(Tokens(tmp_path)) as tokens:
        assert [(each.owner, each.scopes, each.quota) for each in tokens.all()] == [("ana", ("use",), Quota())]
        assert tokens.find(secret) is not None


def test_the_registry_does_not_contain_the_secret(tokens, tmp_path):
    secret = tokens.create("ana")
    with sqlite3.connect(tmp_path / FILE) as db:
        dump = "\n".join(db.iterdump())
    db.close()
    assert "ana" in dump
    assert secret not in dump
    assert secret.removeprefix(PREFIX) not in dump


@pytest.mark.parametrize("guess", ["", "ana", PREFIX, PREFIX + "x" * 43, "\udcff", "x" * 100_000])
def test_a_wrong_secret_finds_nothing(tokens, guess):
    tokens.create("ana")
    assert tokens.find(guess) is None


def test_an_expired_token_opens_nothing(tokens, monkeypatch):
    secret = tokens.create("ana", ttl_s=60)
    created = tokens.all()[0].created
    monkeypatch.setattr(time, "time", lambda: created + 59)
    assert tokens.find(secret) is not None
    monkeypatch.setattr(time, "time", lambda: created + 60)
    assert tokens.find(secret) is None


def test_a_revoked_token_opens_nothing_in_a_server_that_runs(tokens, tmp_path):
    secret = tokens.create("ana")
    assert tokens.find(secret) is not None
    operator = Tokens(tmp_path)  # another process
    operator.revoke("ana")
    operator.close()
    assert tokens.find(secret) is None


def test_the_last_use_is_recorded(tokens):
    secret = tokens.create("ana")
    assert tokens.all()[0].last_used is None
    tokens.find(secret)
    assert tokens.all()[0].last_used is not None


def test_two_tokens_cannot_have_one_name(tokens):
    tokens.create("ana")
    with pytest.raises(TokenExists, match="'ana'"):
        tokens.create("ana")


def test_only_a_known_token_can_be_revoked(tokens):
    with pytest.raises(TokenNotFound, match="'bob'"):
        tokens.revoke("bob")


@pytest.mark.parametrize("name", ["", " ana", "ana ", "a\nb", "a\x1bb", "x" * 65, "issuer|user"])
def test_a_name_that_would_spoil_a_log_is_refused(tokens, name):
    with pytest.raises(BadTokenName, match="printable"):
        tokens.create(name)
    with pytest.raises(BadTokenName, match="printable"):
        tokens.create("bob", owner=name)
    assert tokens.all() == []


def test_a_token_is_found_while_another_process_writes(tokens, tmp_path):
    secret = tokens.create("ana")
    with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        found = tokens.find(secret)
    assert found.name == "ana"
    assert tokens.all()[0].last_used is None
    assert tokens.find(secret)
    assert tokens.all()[0].last_used is not None
