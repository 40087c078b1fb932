"""Parts of the agent, without a machine."""

import os
import platform
import sys
from pathlib import Path

import pytest

from guest.agent import languages
from guest.agent.__main__ import FIRST_PID_NAMESPACE, parse_options
from guest.agent.languages import version_of
from guest.agent.loop import HIGH_WATER, Link, Loop

GUEST = Path(__file__).parents[2] / "guest"


def test_a_kernel_does_not_import_the_agent_that_starts_it():
    assert not [file.name for file in (GUEST / "kernels").glob("*.py") if "guest.agent" in file.read_text()]


def test_own_pids_is_refused_outside_of_a_pid_namespace(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["agent", "--stdio", "--user", "none", "--own-pids"])
    monkeypatch.setattr(os, "readlink", lambda _path: FIRST_PID_NAMESPACE)
    with pytest.raises(SystemExit):
        parse_options()
    assert "needs a PID namespace" in capsys.readouterr().err
    monkeypatch.setattr(os, "readlink", lambda _path: "pid:[4026532000]")
    assert parse_options().own_pids


def test_an_agent_has_one_channel_to_its_host(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["agent", "--stdio", "--vsock", "5000"])
    with pytest.raises(SystemExit):
        parse_options()
    assert "not allowed with" in capsys.readouterr().err


def test_the_python_version_is_that_of_the_image_not_of_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert version_of("python") == platform.python_version()
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\necho 3.99.1\n")
    python.chmod(0o755)
    monkeypatch.setattr(languages, "python_for", lambda language: [str(python)])
    assert version_of("python") == "3.99.1"


def test_a_full_link_reports_when_it_is_empty_even_if_the_peer_takes_all_at_once(tmp_path: Path):
    incoming, writer = os.pipe()
    link = Link(Loop(), (incoming, os.open(tmp_path / "peer", os.O_WRONLY | os.O_CREAT)), print, print)
    drained: list[bool] = []
    link.on_drained.append(lambda: drained.append(link.full))
    link.send({}, bytes(HIGH_WATER))
    assert link.full
    link.flush()
    link.send({}, b"little")
    link.flush()
    assert drained == [False]
    link.close()
    os.close(writer)
