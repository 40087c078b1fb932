"""A program that the operator chose for a driver, instead of the one of Debian.

It is copied into the store if it has the checksum that the operator was given by its makers. A file in the home says
which one to use, so that one rename switches, and the old one stays for the machines that it runs.
"""

import hashlib
import json
import os
import platform
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import httpx2

from templates.errors import UnreadableChoice
from templates.store import Inputs
from templates.tools import StepFailed, Tools
from vmm.types import Program

FILE_NAME = "programs.json"  # in the home: the package of a program -> the SHA-512 of the file to use instead
MAX_BYTES = 512 * 1024**2  # runsc has 40 to 80 MB
CHUNK_BYTES = 1024**2
STALL_S = 60.0  # without a byte from the server
REPORT_BYTES = 20_000_000  # after so many the progress is reported
EXECUTABLE = 0o755  # regardless of the umask: machines run as other users


class ChosenPrograms:
    """Which programs the operator chose in a home."""

    def __init__(self, home: Path) -> None:
        self._file = home / FILE_NAME

    def sha512_of(self, program: Program) -> str | None:
        """Return the checksum of the chosen one, if there is one."""
        return self._stored().get(program.package)

    def choose(self, program: Program, sha512: str | None) -> None:
        """Use the program with this checksum from now on; None: the one of Debian."""
        others = {package: known for package, known in self._stored().items() if package != program.package}
        chosen = others | ({program.package: sha512} if sha512 else {})
        self._file.parent.mkdir(parents=True, exist_ok=True)
        new = self._file.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(chosen, indent=2, sort_keys=True) + "\n")
        new.replace(self._file)

    def _stored(self) -> dict[str, str]:
        """Return the choices. Raises UnreadableChoice: to fall back to Debian's program could undo a fix."""
        try:
            found = json.loads(self._file.read_text())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise UnreadableChoice(self._file) from error
        if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
            raise UnreadableChoice(self._file)
        return found


def chosen_inputs(program: Program, sha512: str) -> Inputs:
    """Return the inputs of a chosen program's entry."""
    return {"package": program.package, "sha512": sha512, "machine": platform.machine()}


def is_address(source: str) -> bool:
    """Return whether a program is to be downloaded, not copied from a path."""
    return "://" in source


async def copy_program(tools: Tools, staging: Path, *, program: Program, source: str, sha512: str) -> dict[str, Any]:
    """Write the program at a path or address to `staging`; raise StepFailed unless it has this checksum."""
    target, digest, size = staging / Path(program.path).name, hashlib.sha512(), 0
    async with await anyio.open_file(target, "wb") as file, aclosing(_chunks(source)) as chunks:
        async for chunk in chunks:
            if (size + len(chunk)) // REPORT_BYTES > size // REPORT_BYTES:
                tools.note(f"{size / 1e6:.0f} MB")
            size += len(chunk)
            if size > MAX_BYTES:
                raise StepFailed(f"{source} has more than {MAX_BYTES // 1024**2} MB, so it is not {program.title}")
            digest.update(chunk)
            await file.write(chunk)
    if digest.hexdigest() != sha512:
        raise StepFailed(
            f"{source} is not what its makers published, or the checksum is that of another file: its SHA-512 is "
            f"{digest.hexdigest()}, not {sha512}. Nothing was installed"
        )
    target.chmod(EXECUTABLE)
    return {"source": source}


async def _chunks(source: str) -> AsyncGenerator[bytes]:
    if not is_address(source):
        async with await anyio.open_file(source, "rb") as file:
            while chunk := await file.read(CHUNK_BYTES):
                yield chunk
        return
    hooks = {"request": [_check_scheme]}  # also called for redirects
    try:
        async with (
            httpx2.AsyncClient(follow_redirects=True, timeout=STALL_S, event_hooks=hooks) as client,
            client.stream("GET", source) as answer,
        ):
            if answer.status_code != httpx2.codes.OK:
                raise StepFailed(f"{source} cannot be downloaded: the server answered {answer.status_code}")
            async for chunk in answer.aiter_bytes():
                yield chunk
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise StepFailed(f"{source} cannot be downloaded: {error or type(error).__name__}") from error


async def _check_scheme(request: httpx2.Request) -> None:
    if urlsplit(str(request.url)).scheme != "https":
        raise StepFailed(f"{request.url} is not an https address; nothing is downloaded from there")
