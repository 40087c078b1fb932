"""What one sandbox may find of the host and of others, and what file requests may be used for."""

import os
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import mcp_sandbox
from guest.places import AGENT_PYTHON, BUILD, OUTPUTS, WORKSPACE
from mcp_sandbox.commands.selftest.inside import host, network
from mcp_sandbox.commands.selftest.results import Outcome, Verdict, broken, failed, held, not_applicable
from mcp_sandbox.commands.selftest.subject import OWNER, Box, Subject
from mcp_sandbox.errors import FileError, SandboxError

PORT = 7777
VIRTUAL_HOSTS = ("127.0.0.1", "127.0.0.2", "10.0.2.2", "10.0.2.3", "169.254.169.254", "::1")
OTHER_SANDBOXES = ("127.0.0.1", "10.0.2.15", "224.0.0.1")
SHARED_PLACES = (WORKSPACE, OUTPUTS, "/tmp", "/dev/shm", "/var/tmp")  # noqa: S108 - in the sandbox
LONG_OUTPUT = "seq 1 300000"  # too long for a result, so that it spills into a file
IDENTITY = f"""
cat /etc/hostname /etc/machine-id
{AGENT_PYTHON} -c "import os, random, uuid; print(os.urandom(8).hex(), random.random(), uuid.uuid4())"
"""
Request = Callable[[], Awaitable[object]]

DEEP = """
import os
for place in {places}:
    os.makedirs(place, exist_ok=True)
    os.chdir(place)
    for _ in range(3000):
        os.mkdir("d")
        os.chdir("d")
"""
CODE_IDENTITY = "import random, uuid\nprint(random.random(), uuid.uuid4())"


# -- the host ----------------------------------------------------------------------------------------------


async def see_processes(subject: Subject) -> Outcome:
    """Look for this process."""
    return await subject.attack(host.see_processes, Path("/proc/self/cmdline").read_text())


async def see_environment(subject: Subject) -> Outcome:
    """Look for a variable of this process."""
    return await subject.attack(host.see_environment, subject.secret)


async def see_files(subject: Subject) -> Outcome:
    """Look for files of this host: the product, its home, and a temporary one."""
    settings = subject.service.settings
    with tempfile.NamedTemporaryFile(prefix="mcp-sandbox-selftest-") as mark:
        paths = (Path(mark.name), Path(mcp_sandbox.__file__), settings.home, settings.run_dir)
        return await subject.attack(host.see_files, [str(path) for path in paths if path.exists()])


async def learn_names(subject: Subject) -> Outcome:
    """Look for the host's names and its kernel's command line."""
    names = {
        socket.gethostname(),
        *(_text(f"/etc/{name}") for name in ("machine-id", "hostname")),
        _text("/proc/cmdline"),
    }
    return await subject.attack(host.learn_names, sorted(names - {"", "localhost"}))


async def reach_host(subject: Subject) -> Outcome:
    """Try to connect to a server on this host."""
    with closing(socket.create_server(("", 0))) as server:
        server.setblocking(False)
        port = server.getsockname()[1]
        own = set(_own_addresses())
        outcome = await subject.attack(network.connect, [(address, port) for address in sorted({*VIRTUAL_HOSTS, *own})])
        with suppress(BlockingIOError):
            return broken(f"a connection arrived from {server.accept()[1]}")
    return outcome


# -- other sandboxes ---------------------------------------------------------------------------------------


async def reach_another(subject: Subject) -> Outcome:
    """Try to connect from one sandbox to another."""
    shared = await subject.shared()
    if "code" not in shared.ways:
        return not_applicable("no process of the template outlives its command")
    async with subject.fresh() as other:
        listening = await other.attack("code", network.listen, PORT)
        if listening.verdict is not Verdict.HELD:
            return listening
        outcome = await shared.attack("code", network.connect, [(address, PORT) for address in OTHER_SANDBOXES])
        visitors = await other.attack("code", network.count_visitors)
    return outcome if visitors.verdict is Verdict.HELD else visitors


async def see_another(subject: Subject) -> Outcome:
    """Look for one sandbox's files in another."""
    box = await subject.shared()
    name = f"mark-of-{box.id}"
    async with subject.fresh() as other:
        for place in SHARED_PLACES:
            await box.command(f"touch {place}/{name}")
        found = await other.command(f"ls {' '.join(SHARED_PLACES)} | grep {name}")
    seen = found.stdout.head.strip()
    return broken(f"another sandbox has {seen}") if seen else held(f"{len(SHARED_PLACES)} places")


async def unique(subject: Subject) -> Outcome:
    """Compare the names and the random numbers of two sandboxes."""
    async with subject.fresh() as one, subject.fresh() as two:
        return _compared([await _identity(one), await _identity(two)])


async def unique_forks(subject: Subject) -> Outcome:
    """Compare the names and the random numbers of a sandbox and its copies."""
    async with subject.fresh() as box:
        copies = [Box(box.service, view) for view in await subject.service.fork(OWNER, box.id, 2)]
        try:
            return _compared([await _identity(each) for each in (box, *copies)])
        finally:
            for copy in copies:
                await subject.service.close(OWNER, copy.id)


# -- file requests -----------------------------------------------------------------------------------------


async def follow_links(subject: Subject) -> Outcome:
    """Let file requests follow links to what code may not touch: the agent acts for code, with its own privileges."""
    async with subject.fresh() as box:
        await box.command(
            f"ln -s /proc/kcore {OUTPUTS}/memory.txt; ln -s /run/mcp-sandbox {WORKSPACE}/agent; "
            f"ln -s /etc {WORKSPACE}/etc; ln -s /root {WORKSPACE}/root"
        )
        reads = (f"{OUTPUTS}/memory.txt", "/proc/kcore", "/proc/1/mem")
        writes = ("etc/evil", "root/evil", "agent/evil", "agent/guest/agent/__main__.py")
        requests: dict[str, Request] = {
            f"reading {path}": partial(box.service.read, OWNER, box.id, path, limit=100) for path in reads
        }
        requests |= {f"writing {path}": partial(box.write, f"{WORKSPACE}/{path}", b"x") for path in writes}
        possible = [name for name, request in requests.items() if not await _refused(request)]
    return broken(f"possible: {', '.join(possible)}") if possible else held(f"{len(requests)} requests refused")


async def spill_through_links(subject: Subject) -> Outcome:
    """Put links where the agent writes long output, and replace the directory by a link."""
    async with subject.fresh() as box:
        links = f"for n in 1 2 3 4 5 6; do ln -s /etc/hostname {OUTPUTS}/run-$n-stdout.txt; done"
        listing = "cat /etc/hostname; ls /etc"
        before = (await box.command(f"{links}; {listing}")).stdout
        for line in (LONG_OUTPUT, f"rm -r {OUTPUTS}; ln -s /etc {OUTPUTS}", LONG_OUTPUT):
            await box.command(line)
        after = (await box.command(listing)).stdout
    return held("no link was followed") if before == after else broken("the agent wrote to /etc")


async def artifacts_elsewhere(subject: Subject) -> Outcome:
    """Make links and odd names in the outputs directory: no artifact may be anywhere else."""
    async with subject.fresh() as box:
        made = await box.command(f"cd {OUTPUTS}; ln -s / root; ln -s /etc/passwd link; touch good ..evil '\n' 'a b'")
        listed = await subject.service.artifacts(OWNER, box.id)
        paths = {artifact.path for artifact in (*listed.artifacts, *made.artifacts)}
    if f"{OUTPUTS}/good" not in paths:
        return failed("the artifacts were not listed")
    outside = [path for path in paths if os.path.normpath(path) != path or path.split("/")[:3] != OUTPUTS.split("/")]
    outside += [path for path in paths if path.startswith((f"{OUTPUTS}/root", f"{OUTPUTS}/link"))]
    if outside:
        return broken(f"artifacts: {', '.join(map(repr, outside))}")
    return held(f"{len(paths)} artifacts, all inside")


async def bad_file_requests(subject: Subject) -> Outcome:
    """Ask for what no file system has. A bad request is an error, never the end of the sandbox."""
    service = subject.service
    async with subject.fresh() as box:
        await box.command(f"mkfifo {WORKSPACE}/fifo")
        requests: dict[str, Request] = {
            "a huge offset": lambda: service.read(OWNER, box.id, "/etc/hostname", offset=2**63, limit=10),
            "a file without end": lambda: service.read_all(OWNER, box.id, "/dev/zero"),
            "a pipe without a writer": lambda: service.read(OWNER, box.id, f"{WORKSPACE}/fifo", limit=10),
            "1,300 directories": lambda: box.write(f"{WORKSPACE}/{'d/' * 1300}file", b"x"),
            "a long name": lambda: box.write(f"{WORKSPACE}/{'n' * 300}", b"x"),
            "a directory as a file": lambda: box.write(WORKSPACE, b"x"),
            "a list of a file": lambda: service.list_files(OWNER, box.id, "/etc/hostname", recursive=True),
            "odd bytes": lambda: box.write(f"{WORKSPACE}/\udcff\n\x1b", b"x"),
        }
        for name, request in requests.items():
            try:
                with suppress(FileError):
                    await request()
            except SandboxError as error:
                return broken(f"{name}: {error}")
            if not await box.goes_on():
                return broken(f"{name}: the sandbox no longer runs commands")
    return held(f"{len(requests)} bad requests answered")


async def deep_directories(subject: Subject) -> Outcome:
    """Nest directories deeper than a path can name, where the agent lists and removes files."""
    async with subject.fresh() as box:
        made = await box.python(DEEP.format(places=(OUTPUTS, WORKSPACE, BUILD)))
        if made.exit_code != 0:
            return failed(f"the directories were not made: {made.stderr.head}")
        try:
            for listing in (OUTPUTS, WORKSPACE):
                with suppress(FileError):
                    await subject.service.list_files(OWNER, box.id, listing, recursive=True)
            if "code" in box.ways:
                await box.code("1 + 1")
        except SandboxError as error:
            return broken(f"the sandbox is lost: {error}")
        return held("the sandbox goes on") if await box.goes_on() else broken("the sandbox no longer runs commands")


async def _refused(request: Request) -> bool:
    try:
        await request()
    except FileError:
        return True
    return False


async def _identity(box: Box) -> list[str]:
    words = (await box.command(IDENTITY)).stdout.head.split()
    if "code" in box.ways:
        words += (await box.code(CODE_IDENTITY)).stdout.head.split()
    return words


def _compared(identities: list[list[str]]) -> Outcome:
    if not all(identities) or len({len(words) for words in identities}) != 1:
        return failed("a sandbox did not tell who it is")
    alike = [words[0] for words in zip(*identities, strict=True) if len(set(words)) < len(words)]
    return (
        broken(f"the same in two sandboxes: {', '.join(alike)}")
        if alike
        else held(f"{len(identities[0])} values differ")
    )


def _own_addresses() -> Iterator[str]:
    with suppress(OSError):
        for found in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET):
            yield str(found[4][0])


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
