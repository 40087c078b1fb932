"""Download Debian packages and unpack them without installing them. apt verifies their signatures as usual."""

from pathlib import Path

from templates.tools import StepFailed, Tools


class PrivateApt:
    """An apt that uses only `sources` and keeps its files in `work`. It needs no root."""

    def __init__(self, tools: Tools, work: Path, sources: str) -> None:
        self._tools = tools
        self._work = work
        self._tree = work / "tree"
        for directory in ("lists/partial", "cache/archives/partial", "tree"):
            (work / directory).mkdir(parents=True)
        path = work / "debian.sources"
        path.write_text(sources)
        settings = {
            "Dir::Etc::SourceList": path,
            "Dir::Etc::SourceParts": "/dev/null",
            "Dir::Etc::Preferences": "/dev/null",  # the host's are about the host's suite
            "Dir::Etc::PreferencesParts": "/dev/null",
            "APT::Default-Release": "",
            "Dir::State::lists": work / "lists",
            "Dir::Cache": work / "cache",
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

    def find(self, *patterns: str) -> Path:
        """Return the first unpacked file that matches a pattern: releases differ in what is below /usr."""
        found = [path for pattern in patterns for path in sorted(self._tree.glob(pattern))]
        if not found:
            raise StepFailed(f"the packages contain no {' or '.join(patterns)}")
        return found[0]
