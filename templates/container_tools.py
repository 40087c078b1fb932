"""Runs skopeo and buildah so that they leave nothing behind but what they were asked for."""

import os
from pathlib import Path

import anyio
import anyio.to_thread

from templates.removal import remove_tree
from templates.tools import StepFailed, Tools
from vmm.process import find_tool

NOBODY = 65_534  # they look for the user's home: it has to be one that is there
# What commands of a Dockerfile leave of their user. An ordinary user may have other uses of it.
TRACES = ("/run/user/{uid}", "/tmp/containers-user-{uid}", "/tmp/podman-run-{uid}")  # noqa: S108
# Where people have logged in to registries, by skopeo, podman or docker.
LOGINS = ("{runtime}/containers/auth.json", "/run/containers/{uid}/auth.json", "{home}/.docker/config.json")


async def run_container_tool(tools: Tools, staging: Path, tool: str, *arguments: str) -> list[str]:
    """Run one of them; what they keep for themselves lies in `staging` for as long as it lasts."""
    if find_tool(tool) is None:
        raise StepFailed(f"{tool} is not installed; `mcp-sandbox setup --images` gets it")
    scratch = staging / "scratch"
    # Root's caches are below /var/lib and /etc whatever they are told. Only for others do they ask the environment; so
    # they are told that root is somebody else, of whom there is nothing else on this host.
    uid = os.geteuid() or NOBODY
    traces = [Path(trace.format(uid=NOBODY)) for trace in TRACES if uid == NOBODY]
    traces = [scratch, *(trace for trace in traces if not trace.exists())]
    folders = {name: str(scratch / name) for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR", "TMPDIR")}
    for folder in folders.values():
        Path(folder).mkdir(parents=True, exist_ok=True)
    environment = {**folders, "_CONTAINERS_ROOTLESS_UID": str(uid), **_login()}
    try:
        # Nobody else would end what a RUN has sent into the background.
        return await tools.run([tool, *arguments], together=tool == "buildah", env=environment)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(_remove, traces)


def _login() -> dict[str, str]:
    """The file with this user's logins, which they would not find with the folders they are given."""
    if "REGISTRY_AUTH_FILE" in os.environ:
        return {}
    uid = os.geteuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{uid}")
    places = (Path(place.format(runtime=runtime, uid=uid, home=Path.home())) for place in LOGINS)
    found = next((place for place in places if place.is_file()), None)
    return {"REGISTRY_AUTH_FILE": str(found)} if found else {}


def _remove(folders: list[Path]) -> None:
    for folder in folders:
        remove_tree(folder)
