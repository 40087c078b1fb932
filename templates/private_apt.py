"""Query Debian's archive, and download and unpack packages without installing them. apt verifies their signatures."""

import re
from dataclasses import dataclass
from pathlib import Path

from templates.tools import StepFailed, Tools

# A line of `apt-get --simulate` about a package that is installed already: Inst NAME [OLD] (NEW ORIGIN…)
_UPGRADED = re.compile(r"Inst (\S+) \[(\S+)\] \((\S+) ")
_URI = re.compile(r"'[^']+' (\S+)\.deb ")  # a line of `apt-get --print-uris`


@dataclass(frozen=True, slots=True)
class Upgrade:
    """A package and the versions before and after an update; an empty version means that it is not installed."""

    package: str
    old: str
    new: str


class PrivateApt:
    """An apt that uses only `sources` and keeps its files in `work`. It needs no root.

    Several can share a directory for package `lists`, so that none is downloaded twice.
    """

    def __init__(self, tools: Tools, work: Path, sources: str, lists: Path | None = None) -> None:
        self._tools = tools
        self._work = work
        self._tree = work / "tree"
        lists = lists or work / "lists"
        for directory in (lists / "partial", work / "cache/archives/partial", self._tree):
            directory.mkdir(parents=True, exist_ok=True)
        path = work / "debian.sources"
        path.write_text(sources)
        settings = {
            "Dir::Etc::SourceList": path,
            "Dir::Etc::SourceParts": "/dev/null",
            "Dir::Etc::Preferences": "/dev/null",  # the host's are about the host's suite
            "Dir::Etc::PreferencesParts": "/dev/null",
            "APT::Default-Release": "",
            "Dir::State::lists": lists,
            "APT::Get::List-Cleanup": "false",
            "Dir::Cache": work / "cache",
            "Dir::Cache::pkgcache": "pkgcache.bin",  # container images switch both caches off
            "Dir::Cache::srcpkgcache": "srcpkgcache.bin",
            "APT::Sandbox::User": "",  # as root, apt would switch to a user who cannot write here
            "Acquire::Languages": "none",
        }
        self._options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]

    async def update(self) -> None:
        """Download the package lists. The host's may be missing or out of date."""
        await self._tools.run(["apt-get", *self._options, "update"])

    async def depends(self, package: str) -> str:
        """Return apt's description of the dependencies of `package`."""
        return "\n".join(await self._tools.run(["apt-cache", *self._options, "depends", package]))

    async def unpack(self, *packages: str) -> list[str]:
        """Download and unpack packages; return their names with versions."""
        await self._tools.run(["apt-get", *self._options, "download", *packages], cwd=self._work)
        debs = sorted(self._work.glob("*.deb"))
        for deb in debs:
            await self._tools.run(["dpkg", "--extract", str(deb), str(self._tree)])
        return [deb.name.removesuffix(".deb") for deb in debs]

    async def newest(self, *packages: str) -> list[str]:
        """Return the names with versions that `unpack` would return now."""
        lines = await self._tools.run(["apt-get", *self._options, "download", "--print-uris", *packages])
        return sorted(found[1] for line in lines if (found := _URI.match(line)))

    async def upgrades(self, dpkg_status: Path, suite: str) -> list[Upgrade]:
        """Return the newer versions of the packages that a dpkg status file lists as installed."""
        settings = (
            f"Dir::State::status={dpkg_status}",
            f"APT::Default-Release={release_pattern(suite)}",
            "APT::Install-Recommends=false",
            "pkgCacheGen::ForceEssential=,",  # apt would add itself
        )
        options = [*self._options, *(word for setting in settings for word in ("-o", setting))]
        lines = await self._tools.run(["apt-get", *options, "--simulate", "dist-upgrade"])
        return [Upgrade(*found.groups()) for line in lines if (found := _UPGRADED.match(line))]

    def find(self, *patterns: str) -> Path:
        """Return the first unpacked file that matches a pattern: releases differ in what is below /usr."""
        found = [path for pattern in patterns for path in sorted(self._tree.glob(pattern))]
        if not found:
            raise StepFailed(f"the packages contain no {' or '.join(patterns)}")
        return found[0]


def release_pattern(suite: str) -> str:
    """Return the pattern of a suite's releases for apt's Default-Release: packages of other suites have to be named."""
    return f"/^{suite}(|-updates|-security)$/"
