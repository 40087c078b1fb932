"""Run skopeo and buildah so that they leave no files behind."""

import os
from pathlib import Path

import anyio
import anyio.to_thread

from templates.tools import StepFailed, Tools
from templates.untrusted_tree import remove_tree
from vmm.process import find_tool

NOBODY = 65_534  # a user with an existing home, which the tools look for
# Directories that RUN commands leave for their user. Those of an ordinary user may have other contents.
LEFTOVERS = ("/run/user/{uid}", "/tmp/containers-user-{uid}", "/tmp/podman-run-{uid}")  # noqa: S108
# Where skopeo, podman and docker store logins to registries.
LOGINS = ("{runtime}/containers/auth.json", "/run/containers/{uid}/auth.json", "{home}/.docker/config.json")


async def run_container_tool(tools: Tools, staging: Path, tool: str, *arguments: str) -> list[str]:
    """Run skopeo or buildah and return its output. Its caches are kept in `staging` and removed afterwards."""
    if find_tool(tool) is None:
        raise StepFailed(f"{tool} is not installed; `mcp-sandbox setup --images` installs it")
    scratch = staging / "scratch"
    # As root they ignore the environment and use /var/lib and /etc. So they run as if root were another user, one
    # that has no files on this host.
    uid = os.geteuid() or NOBODY
    leftovers = [Path(path.format(uid=NOBODY)) for path in LEFTOVERS if uid == NOBODY]
    leftovers = [scratch, *(path for path in leftovers if not path.exists())]
    folders = {name: str(scratch / name) for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR", "TMPDIR")}
    for folder in folders.values():
        Path(folder).mkdir(parents=True, exist_ok=True)
    environment = {**folders, "_CONTAINERS_ROOTLESS_UID": str(uid), **_login()}
    try:
        # buildah does not end background processes of RUN commands.
        return await tools.run([tool, *arguments], isolated=tool == "buildah", env=environment)
    finally:
        with anyio.CancelScope(shield=True):
            for path in leftovers:
                await anyio.to_thread.run_sync(remove_tree, path)


def _login() -> dict[str, str]:
    """Return the variable that names the user's login file, which the tools cannot find in the scratch directories."""
    if "REGISTRY_AUTH_FILE" in os.environ:
        return {}
    uid = os.geteuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{uid}")
    files = (Path(file.format(runtime=runtime, uid=uid, home=Path.home())) for file in LOGINS)
    found = next((file for file in files if file.is_file()), None)
    return {"REGISTRY_AUTH_FILE": str(found)} if found else {}
