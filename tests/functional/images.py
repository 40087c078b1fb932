"""OCI images for tests, written by hand, and a registry on loopback."""

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from templates import apt_sources
from templates.build import Builder
from templates.debian import BASE_TAR, base_inputs, make_base
from templates.private_apt import PrivateApt
from templates.revisions import Revisions
from templates.store import Store
from templates.tools import LoggedTools
from tests.waiting import HANG_S

BLOB, MANIFEST = "application/vnd.oci.image.layer.v1.tar", "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"


async def static_busybox(store: Store) -> Path:
    """Return a program that needs no library: the guest kernel's busybox."""
    kernel = await Builder(store).build_kernel()
    return kernel.vmlinuz.parent / "busybox"


async def debian_base(store: Store) -> Path:
    """Return the tar file of the base that templates are made from."""
    tools = LoggedTools(store.logs / "testbase.log", lambda line: None)
    inputs = Revisions(store.home).apply(base_inputs("bookworm"))
    made = await store.obtain("base", inputs, lambda staging: make_base(tools, staging, "bookworm"))
    return made.path / BASE_TAR


def layer_of(files: Mapping[str, bytes | Path], links: Mapping[str, str] | None = None) -> bytes:
    """Return a layer with these executable files, or whole directories of the host."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in files.items():
            if isinstance(content, Path):
                tar.add(content, name)
                continue
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o755
            tar.addfile(info, io.BytesIO(content))
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)
    return packed.getvalue()


def write_layout(folder: Path, layers: Sequence[bytes], tag: str = "latest", **config: Any) -> str:
    """Write an OCI layout with one image; return the digest of its manifest."""
    blobs = folder / "blobs/sha256"
    blobs.mkdir(parents=True)

    def add(kind: str, content: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        (blobs / digest).write_bytes(content)
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(content)}

    descriptors = [add(BLOB, layer) for layer in layers]
    ids = {"type": "layers", "diff_ids": [layer["digest"] for layer in descriptors]}
    settings = add(
        CONFIG, json.dumps({"os": "linux", "architecture": "amd64", "config": config, "rootfs": ids}).encode()
    )
    manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": settings, "layers": descriptors}
    entry = add(MANIFEST, json.dumps(manifest).encode())
    named = {**entry, "annotations": {"org.opencontainers.image.ref.name": tag}}
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [named]}))
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return str(entry["digest"])


@asynccontextmanager
async def registry(store: Store, folder: Path) -> AsyncIterator[str]:
    """Run a registry on a free loopback port with its data in `folder`; yield its host and port."""
    program = await _registry_program(store)
    settings = folder / "registry.yml"
    settings.write_text(
        json.dumps(
            {
                "version": 0.1,
                "storage": {"filesystem": {"rootdirectory": str(folder / "registry")}, "delete": {"enabled": True}},
                "http": {"addr": "127.0.0.1:0"},
            }
        )
    )
    with subprocess.Popen([program, "serve", settings], stderr=subprocess.PIPE, text=True) as process:
        try:
            with anyio.fail_after(HANG_S):
                address = await anyio.to_thread.run_sync(_address, process, abandon_on_cancel=True)
            yield address
        finally:
            process.kill()


def run_skopeo(scratch: Path, *arguments: str) -> None:
    """Run skopeo with its caches in `scratch`."""
    places = dict.fromkeys(("XDG_DATA_HOME", "XDG_RUNTIME_DIR", "TMPDIR"), str(scratch))
    environment = {**os.environ, **places, "_CONTAINERS_ROOTLESS_UID": "1"}
    subprocess.run(["skopeo", *arguments], check=True, timeout=HANG_S, env=environment)


def _address(process: "subprocess.Popen[str]") -> str:
    """Read the address from the registry's log."""
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"listening on (127\.0\.0\.1:\d+)", line):
            return found[1]
    raise AssertionError("the registry ended")


async def _registry_program(store: Store) -> Path:
    """Return Debian's registry, downloaded to the store: installing the package would start a service on this host."""

    async def make(staging: Path) -> dict[str, str]:
        sources = apt_sources.sources_for("bookworm")
        assert sources is not None
        tools = LoggedTools(store.logs / "testregistry.log", lambda line: None)
        packages = PrivateApt(tools, staging / "work", sources)
        await packages.update()
        await packages.unpack("docker-registry")
        shutil.move(packages.find("usr/bin/docker-registry"), staging / "docker-registry")
        shutil.rmtree(staging / "work")
        return {}

    entry = await store.obtain("testregistry", {"package": "docker-registry"}, make)
    return entry.path / "docker-registry"


@contextmanager
def containers_untouched() -> Iterator[None]:
    """Check that container tools leave nothing in their usual directories."""
    before = _container_directories()
    yield
    assert _container_directories() == before


def _container_directories() -> set[Path]:
    homes = (Path("/var/lib"), Path("/run"), Path("/etc"), Path.home() / ".local/share", Path.home() / ".config")
    found = [*Path("/run/user").glob("*"), *Path("/tmp").glob("containers-user-*"), *Path("/tmp").glob("podman-run-*")]
    places = (home / name for home in homes for name in ("containers/cache", "containers/storage", "cni"))
    return {*found, *(place for place in places if place.exists())}
