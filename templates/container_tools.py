"""Run skopeo and buildah so that they leave no files behind."""

import os
from pathlib import Path

from templates.environment import certificates
from templates.namespaces import Private
from templates.tools import StepFailed, Tools
from vmm.process import find_tool

PRIVATE_HOME = "/tmp"  # noqa: S108 - private to them
NOBODY = 65_534  # a user with an existing home, which the tools look for
# Where skopeo, podman and docker store logins to registries.
LOGINS = ("{runtime}/containers/auth.json", "/run/containers/{uid}/auth.json", "{home}/.docker/config.json")
LOGIN_FILE = "REGISTRY_AUTH_FILE"


async def run_container_tool(
    tools: Tools, staging: Path, tool: str, *arguments: str, visible: tuple[Path, ...] = ()
) -> list[str]:
    """Run skopeo or buildah and return its output. Its caches are private, and gone afterwards.

    `visible` names what it needs besides `staging`.
    """
    if find_tool(tool) is None:
        raise StepFailed(f"{tool} is not installed; `mcp-sandbox setup --images` installs it")
    login = _login()
    environment = {
        **certificates(),
        **dict.fromkeys(("XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR"), PRIVATE_HOME),
        "HOME": str(Path.home()),  # for programs that docker's login file names
        # As root they ignore these variables and use /var/lib and /etc. So they run as if root were another user,
        # one that has no files on this host.
        "_CONTAINERS_ROOTLESS_UID": str(os.geteuid() or NOBODY),
        **({LOGIN_FILE: str(login)} if login else {}),
    }
    needed = (staging, *visible, *([login] if login else []))
    # skopeo only copies files, so it works for ordinary users without subordinate ids, too.
    private = Private(staging / "scratch", needed, subordinate_ids=tool == "buildah")
    return await tools.run([tool, *arguments], private=private, env=environment)


def _login() -> Path | None:
    """Return the user's login file, which the tools cannot find in their private directories."""
    if LOGIN_FILE in os.environ:
        return Path(os.environ[LOGIN_FILE]).absolute()
    uid = os.geteuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{uid}")
    files = (Path(file.format(runtime=runtime, uid=uid, home=Path.home())) for file in LOGINS)
    return next((file for file in files if file.is_file()), None)
