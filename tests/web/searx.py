"""A real metasearch engine: Debian's searx, unpacked beside the virtual environment and run on loopback."""

import json
import re
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from anyio.streams.text import TextReceiveStream

PACKAGE = "python3-searx"
UNPACKED = Path(__file__).parents[2] / ".venv" / "searx"  # kept for later runs
PYTHON = "/usr/bin/python3"  # Debian's: its packages have compiled parts
MODULES = "usr/lib/python3/dist-packages"
URI = re.compile(r"^'[^']+' (\S+?)_\S+\.deb ", re.MULTILINE)  # a line of `apt-get --print-uris`
ADDRESS = re.compile(r"Running on (http://127\.0\.0\.1:\d+)")
INSTALL_S = 300.0


class NoSearx(Exception):
    """Debian's searx cannot be had on this host."""


def install() -> Path:
    """Return the directory with searx and what it needs, downloaded once. Nothing is installed on the host."""
    if UNPACKED.is_dir():
        return UNPACKED
    packages = _missing()
    if packages is None:
        _run("apt-get", "update", cwd="/")
        packages = _missing()
    if packages is None:
        raise NoSearx(f"apt-get does not find the package {PACKAGE}, which Debian 12 has")
    with tempfile.TemporaryDirectory(dir=UNPACKED.parent) as scratch:
        if packages:
            _run("apt-get", "download", *packages, cwd=scratch)
        root = Path(scratch) / "root"
        root.mkdir()
        for package in Path(scratch).glob("*.deb"):
            _run("dpkg", "-x", package.name, str(root), cwd=scratch)
        root.rename(UNPACKED)
    return UNPACKED


def _missing() -> list[str] | None:
    """Return the packages that searx needs and this host does not have, or None if apt does not know searx."""
    command = ["apt-get", "install", "--print-uris", "-y", "--no-install-recommends", PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
    return URI.findall(done.stdout) if done.returncode == 0 else None


def _run(*command: str, cwd: str) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=INSTALL_S)
    if done.returncode:
        raise NoSearx(f"{' '.join(command[:2])} failed: {done.stderr[-2000:]}")


def settings_for(site: str, folder: Path) -> Path:
    """Write the settings of an instance with one engine, which asks the test's own site; returns the file."""
    for name in ("static", "templates/oscar"):  # JSON needs no pages, only their directories
        (folder / name).mkdir(parents=True)
    engine = {
        "name": "library",
        "engine": "json_engine",
        "shortcut": "lib",
        "categories": "general",
        "paging": True,
        "enable_http": True,
        "search_url": site + "/find?words={query}&page={pageno}",
        "results_query": "books",
        "url_query": "address",
        "title_query": "name",
        "content_query": "about",
    }
    settings = {
        "general": {"debug": False, "instance_name": "test", "enable_stats": False},
        "search": {"safe_search": 0, "autocomplete": "", "default_lang": "en"},
        "server": {
            "port": 0,
            "bind_address": "127.0.0.1",
            "secret_key": "of a test",
            "base_url": False,
            "image_proxy": False,
            "http_protocol_version": "1.1",
        },
        "ui": {
            "static_path": str(folder / "static"),
            "templates_path": str(folder / "templates"),
            "default_theme": "oscar",
            "default_locale": "",
            "theme_args": {"oscar_style": "logicodev"},
        },
        "outgoing": {"request_timeout": 60.0, "useragent_suffix": ""},
        "locales": {"en": "English"},
        "doi_resolvers": {"none": "http://127.0.0.1"},
        "default_doi_resolver": "none",
        "enabled_plugins": [],
        "engines": [engine],
    }
    file = folder / "settings.yml"
    file.write_text(json.dumps(settings))  # which is YAML, too
    return file


@asynccontextmanager
async def searx(site: str, folder: Path) -> AsyncIterator[str]:
    """Run an instance whose one engine asks `site`; yields its address."""
    root = await anyio.to_thread.run_sync(install)
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(root / MODULES),
        "PYTHONDONTWRITEBYTECODE": "1",
        "SEARX_SETTINGS_PATH": str(settings_for(site, folder)),
    }
    command = [PYTHON, "-s", "-P", "-m", "searx.webapp"]
    async with await anyio.open_process(command, env=environment, cwd=folder, stderr=subprocess.STDOUT) as process:
        try:
            assert process.stdout is not None
            output = TextReceiveStream(process.stdout)
            text = ""
            while (found := ADDRESS.search(text)) is None:
                text += await output.receive()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_drain, output)
                yield found[1]
                tasks.cancel_scope.cancel()
        except anyio.EndOfStream:
            raise NoSearx(f"searx ended:\n{text[-4000:]}") from None
        finally:
            process.kill()


async def _drain(output: TextReceiveStream) -> None:
    async for _ in output:
        pass
