"""The bridge looks names up by the host's own resolver: here a real one, whose name server rebinds a name."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.functional.checkout import REPO
from tests.waiting import HANG_S

OWN_NAMESPACES = ["unshare", "--user", "--map-root-user", "--net", "--mount"]


@pytest.fixture(scope="module")
def outcome() -> dict[str, Any]:
    command = [*OWN_NAMESPACES, sys.executable, "-m", "tests.functional.rebinding_script"]
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}  # and no proxy of this host
    ran = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=HANG_S)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def test_a_name_that_is_rebound_is_connected_to_the_checked_address_only(outcome: dict[str, Any]):
    assert outcome["answers"][0] == "public"
    assert outcome["asked"].count("rebinding.example") == 2  # once for each of two requests
    assert outcome["inside"] == 0


def test_every_request_is_decided_by_what_the_name_server_says_now(outcome: dict[str, Any]):
    assert outcome["rules"] == ["public", "address-loopback", "public", "address-loopback", "dns"]
    assert "refused this request (address-loopback)" in outcome["answers"][1]
