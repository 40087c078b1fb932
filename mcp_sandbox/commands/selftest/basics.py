"""That sandboxes work: one check for each thing that every client does."""

import secrets

from guest.places import OUTPUTS, WORKSPACE
from mcp_sandbox.commands.selftest.results import Outcome, broken, held, not_applicable
from mcp_sandbox.commands.selftest.subject import OWNER, Box, Subject
from mcp_sandbox.errors import SandboxNotFound

FILE_BYTES = 300_000
TIMEOUT_S = 1.0


async def start(subject: Subject) -> Outcome:
    """Create a sandbox."""
    view = (await subject.shared()).view
    return held(f"{view.isolation} isolation, ready after {view.restore_ms:.0f} ms")


async def run_code(subject: Subject) -> Outcome:
    """Set a variable, and read it in the next run."""
    box = await subject.shared()
    if "code" not in box.ways:
        return not_applicable(f"the template is for {box.view.language}")
    await box.code("number = 6")
    shown = (await box.code("print(number * 7)")).stdout.head
    return _expected(shown.strip(), "42")


async def run_commands(subject: Subject) -> Outcome:
    """Change the directory, and read it in the next command."""
    box = await subject.shared()
    await box.command("cd /usr")
    shown = (await box.command(f"pwd; cd {WORKSPACE}; exit 3")).stdout.head
    return _expected(shown.strip(), "/usr")


async def fail(subject: Subject) -> Outcome:
    """Let a command fail: that is a result."""
    box = await subject.shared()
    result = await box.command("echo wrong >&2; exit 3")
    return _expected(f"{result.exit_code} {result.stderr.head.strip()}", "3 wrong")


async def time_out(subject: Subject) -> Outcome:
    """Let a command run into its time limit."""
    box = await subject.shared()
    result = await box.command("sleep 600", TIMEOUT_S)
    return _expected(f"{result.timed_out_after_s} {await box.goes_on()}", f"{TIMEOUT_S} True")


async def exchange_files(subject: Subject) -> Outcome:
    """Write a file, and read it again."""
    box = await subject.shared()
    data = secrets.token_bytes(FILE_BYTES)
    await box.write(f"{WORKSPACE}/file", data)
    same = await box.read(f"{WORKSPACE}/file") == data
    return held(f"{FILE_BYTES:,} bytes") if same else broken("the file came back changed")


async def find_artifacts(subject: Subject) -> Outcome:
    """Leave an artifact, and read it."""
    box = await subject.shared()
    path = f"{OUTPUTS}/selftest.txt"
    result = await box.command(f"echo made > {path}")
    told = [artifact.path for artifact in result.artifacts]
    listed = [artifact.path for artifact in (await subject.service.artifacts(OWNER, box.id)).artifacts]
    if path not in told or path not in listed:
        return broken("the artifact was not reported")
    return _expected((await box.read(path)).decode(), "made\n")


async def fork(subject: Subject) -> Outcome:
    """Copy a sandbox, and look for its file in the copy."""
    async with subject.fresh() as box:
        await box.write(f"{WORKSPACE}/forked", b"original")
        [view] = await subject.service.fork(OWNER, box.id, 1)
        copy = Box(subject.service, view)
        try:
            content = (await copy.read(f"{WORKSPACE}/forked")).decode()
            await copy.write(f"{WORKSPACE}/forked", b"copy")
            return _expected(f"{content} {(await box.read(f'{WORKSPACE}/forked')).decode()}", "original original")
        finally:
            await subject.service.close(OWNER, copy.id)


async def pause(subject: Subject) -> Outcome:
    """Save a sandbox to disk, and continue it."""
    async with subject.fresh() as box:
        await box.write(f"{WORKSPACE}/paused", b"kept")
        await subject.service.pause(OWNER, box.id)
        await subject.service.resume(OWNER, box.id)
        return _expected((await box.read(f"{WORKSPACE}/paused")).decode(), "kept")


async def close(subject: Subject) -> Outcome:
    """Close a sandbox: it accepts nothing any more."""
    async with subject.fresh() as box:
        await subject.service.close(OWNER, box.id)
        try:
            await box.command("true")
        except SandboxNotFound:
            return held("it is gone")
    return broken("a closed sandbox still runs commands")


def _expected(found: str, wanted: str) -> Outcome:
    return held(wanted.strip()) if found == wanted else broken(f"expected {wanted!r}, got {found!r}")
