"""Read the host's apt sources, so that images are built from the same mirror."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ETC = Path("/etc")


@dataclass(frozen=True, slots=True)
class AptSource:
    """One apt source: the relevant fields of a deb822 stanza."""

    uris: tuple[str, ...]
    suites: tuple[str, ...]
    components: tuple[str, ...]
    signed_by: str | None  # a path, or an inline key

    def __str__(self) -> str:
        lines = [
            "Types: deb",
            f"URIs: {' '.join(self.uris)}",
            f"Suites: {' '.join(self.suites)}",
            f"Components: {' '.join(self.components)}",
        ]
        return "\n".join([*lines, f"Signed-By: {self.signed_by}"] if self.signed_by else lines) + "\n"


def host_codename(etc: Path = ETC) -> str | None:
    """Return the Debian suite this host runs; None if it is not Debian."""
    try:
        text = (etc / "os-release").read_text()
    except OSError:
        return None
    fields = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', text, re.MULTILINE))
    return fields.get("VERSION_CODENAME") if fields.get("ID") == "debian" else None


def sources_for(suite: str, etc: Path = ETC) -> str | None:
    """Return the host's Debian sources, rewritten for `suite`, as deb822 text; None if it has none.

    Only entries for the host's suite with component main are used: a mirror that has one suite has the others, and
    third-party sources do not belong in a sandbox.
    """
    codename = host_codename(etc)
    if codename is None:
        return None
    found = [
        AptSource(
            uris=source.uris,
            suites=tuple(suite + name.removeprefix(codename) for name in source.suites if _belongs(name, codename)),
            components=("main",),
            signed_by=source.signed_by,
        )
        for source in _host_sources(etc)
        if "main" in source.components
    ]
    found = [source for source in found if source.suites]
    has_release = any(suite in source.suites for source in found)
    return "\n".join(map(str, found)) if has_release else None


def _belongs(name: str, codename: str) -> bool:
    return name in (codename, f"{codename}-updates", f"{codename}-security")


def _host_sources(etc: Path) -> Iterator[AptSource]:
    for path in sorted((etc / "apt/sources.list.d").glob("*.sources")):
        yield from _parse_deb822(path.read_text(errors="replace"))
    for path in [etc / "apt/sources.list", *sorted((etc / "apt/sources.list.d").glob("*.list"))]:
        if path.is_file():
            yield from _parse_one_line(path.read_text(errors="replace"))


def _parse_deb822(text: str) -> Iterator[AptSource]:
    for stanza in re.split(r"\n\s*\n", text):
        fields: dict[str, str] = {}
        name = ""
        for line in stanza.splitlines():
            if line.startswith("#"):
                continue
            if line[:1] in (" ", "\t"):  # a continuation line, as in inline keys
                fields[name] = f"{fields.get(name, '')}\n{line}"
            elif ":" in line:
                name, _, value = line.partition(":")
                name = name.strip().lower()
                fields[name] = value.strip()
        enabled = fields.get("enabled", "yes").lower() not in ("no", "false")
        if enabled and "deb" in fields.get("types", "").split():
            yield AptSource(
                uris=tuple(fields.get("uris", "").split()),
                suites=tuple(fields.get("suites", "").split()),
                components=tuple(fields.get("components", "").split()),
                signed_by=fields.get("signed-by"),
            )


def _parse_one_line(text: str) -> Iterator[AptSource]:
    for line in text.splitlines():
        match = re.match(r"deb\s+(?:\[([^\]]*)\]\s*)?(\S+)\s+(\S+)\s+([^#]+)", line.strip())
        if match:
            options, uri, suite, components = match.groups()
            signed_by = re.search(r"signed-by=(\S+)", options or "", re.IGNORECASE)
            yield AptSource(
                uris=(uri,),
                suites=(suite,),
                components=tuple(components.split()),
                signed_by=signed_by.group(1) if signed_by else None,
            )
