"""Fetch OCI images from registries and files with skopeo, verify their digests, and merge their layers."""

import hashlib
import json
import re
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import anyio.to_thread

from templates.container_tools import run_container_tool
from templates.disk import disk_usage, require_free, run_bounded
from templates.image_config import read_config, to_details
from templates.layers import merge_layers
from templates.model import Template
from templates.removal import remove_tree
from templates.tools import StepFailed, Tools

LAYERS_TAR = "layers.tar"
RECIPE = 1  # part of the cache key: raise it when a change here requires a rebuild
MAX_BYTES = 20 * 1024**3  # of an unpacked image, which is on disk three times while it is merged
MAX_RATIO = 50  # unpacked to packed size; 2 to 5 is usual, and text has 20
SMALL = 1024**3  # bytes that any image may have unpacked, whatever the ratio
REFUSED = "the image is refused: unpacked, it is"
MAX_JSON = 4 * 1024 * 1024  # bytes of a manifest; registries refuse larger ones
_FILE = re.compile(r"(oci|oci-archive|docker-archive):([^:]+)(:.+)?")  # kind, path, image within the file
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_LOOPBACK = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?/")  # plain HTTP is safe there


def oci_inputs(template: Template) -> dict[str, Any]:
    """Return the inputs of an image's layers. A tag is resolved when it is fetched, and not again."""
    name = _name(template)
    file = _FILE.fullmatch(name)
    content = _content(template.folder / file[2]) if file else None
    return {"recipe": RECIPE, "template": template.name, "image": name, "content": content}


async def make_oci(tools: Tools, staging: Path, template: Template) -> dict[str, Any]:
    """Write `staging`/layers.tar: the image that the template names."""
    name = _name(template)
    file = _FILE.fullmatch(name)
    if file is None:
        return await _fetch(tools, staging, template, name)
    kind, path, which = file.groups()
    found = template.folder / path
    if not found.exists():
        raise StepFailed(f"{found} does not exist")
    return await unpack_image(tools, staging, template, f"{kind}:{found}{which or ''}", visible=(found,))


async def _fetch(tools: Tools, staging: Path, template: Template, name: str) -> dict[str, Any]:
    """Resolve a name to its current digest, then fetch the image with that digest."""
    digest = await resolve_digest(tools, staging, name)
    untagged = re.sub(r":[^:/]*$", "", name.partition("@")[0])  # skopeo accepts either a tag or a digest
    details = await unpack_image(tools, staging, template, f"docker://{untagged}@{digest}", f"--src-{_tls(name)}")
    return {**details, "digest": digest}


def has_moving_tag(template: Template) -> bool:
    """Whether the image is in a registry and named by a tag, which can point to another digest later."""
    name = _name(template)
    return not _FILE.fullmatch(name) and "@" not in name


async def resolve_digest(tools: Tools, staging: Path, name: str) -> str:
    """Return the digest of an image in a registry: the one in its name, or the current one of its tag."""
    digest = name.partition("@")[2]
    if not digest:
        inspect = ("inspect", f"--{_tls(name)}", "--no-tags", "--format={{.Digest}}", f"docker://{name}")
        output = await run_container_tool(tools, staging, "skopeo", *inspect)
        digest = next((line for line in reversed(output) if _DIGEST.fullmatch(line)), "")
    if not _DIGEST.fullmatch(digest):
        raise StepFailed(f"{name} has no digest of the form sha256:…")
    return digest


def _tls(name: str) -> str:
    return "tls-verify=false" if _LOOPBACK.match(name) else "tls-verify=true"


async def unpack_image(
    tools: Tools, staging: Path, template: Template, source: str, *options: str, visible: tuple[Path, ...] = ()
) -> dict[str, Any]:
    """Copy an image with skopeo, which verifies every digest, and merge its layers into one tar file."""
    packed, copy = staging / "packed", staging / "copy"
    run_skopeo = partial(run_container_tool, tools, staging, "skopeo", visible=visible)
    await run_skopeo("copy", *options, source, f"dir:{packed}")
    limit = unpacked_limit(size := disk_usage(packed))
    require_free(staging, 2 * size, "the image")  # at least: layers that are unpacked and then merged
    # Only with a `dir:` destination does skopeo decompress layers of every format.
    unpack = partial(run_skopeo, "copy", "--dest-decompress", f"dir:{packed}", f"dir:{copy}")
    await run_bounded(copy, limit, REFUSED, unpack)
    await anyio.to_thread.run_sync(remove_tree, packed)
    manifest = _read_json(copy / "manifest.json")
    if not isinstance(manifest, dict) or not isinstance(manifest.get("layers"), list):
        raise StepFailed("the image's manifest is damaged")
    config = read_config(_read_json(_blob(copy, manifest.get("config"))))
    layers = [_blob(copy, layer) for layer in manifest["layers"]]
    tools.note(f"merging {len(layers)} layers")
    await anyio.to_thread.run_sync(merge_layers, layers, staging / LAYERS_TAR, limit)
    await anyio.to_thread.run_sync(remove_tree, copy)
    return {"template": template.name, "config": to_details(config)}


def unpacked_limit(packed: int) -> int:
    """Return how large an image of `packed` bytes may become: a few megabytes can unpack to any size."""
    return min(MAX_BYTES, max(SMALL, MAX_RATIO * packed))


def _name(template: Template) -> str:
    assert template.source.oci is not None
    return template.source.oci


def _blob(copy: Path, descriptor: object) -> Path:
    """Return the file of a blob that the manifest describes. skopeo names it after its verified digest."""
    digest = descriptor.get("digest") if isinstance(descriptor, dict) else None
    if not isinstance(digest, str) or not (found := _DIGEST.fullmatch(digest)):
        raise StepFailed("the image's manifest is damaged")
    return copy / found[1]


def _read_json(path: Path) -> object:
    try:
        with path.open("rb") as file:
            return json.loads(file.read(MAX_JSON))
    except (OSError, ValueError, RecursionError):
        raise StepFailed("the image's manifest or configuration is damaged") from None


def _content(path: Path) -> str:
    """Return the digest of a file, or of an OCI layout's index, which names everything in it."""
    path = path / "index.json" if path.is_dir() else path
    try:
        status = path.stat()
    except OSError:
        return "missing"
    return file_digest(path, (status.st_ino, status.st_mtime_ns, status.st_size))


@lru_cache(maxsize=16_384)
def file_digest(path: Path, _stamp: tuple[int, ...]) -> str:
    """Return a file's SHA-256, cached until the file changes: hashing a large one takes seconds."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
