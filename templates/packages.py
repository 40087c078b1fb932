"""Debian packages fetched for our own use: checked by apt as ever, unpacked, and never installed."""

from pathlib import Path

from templates.tools import StepFailed, Tools


class PrivateApt:
    """An apt that knows `sources` alone and keeps everything in `work`; no root needed."""

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
            "Dir::Etc::Preferences": "/dev/null",  # those of the host are about the host's suite
            "Dir::Etc::PreferencesParts": "/dev/null",
            "APT::Default-Release": "",
            "Dir::State::lists": work / "lists",
            "Dir::Cache": work / "cache",
            "APT::Sandbox::User": "",  # as root apt would drop to a user who cannot write here
            "Acquire::Languages": "none",
        }
        self._options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]

    async def update(self) -> None:
        """Get lists of our own: those of the host may be missing, or so old that the packages they name are gone."""
        await self._tools.run(["apt-get", *self._options, "update"])

    async def depends(self, package: str) -> str:
        """What apt says about the packages that `package` needs."""
        return "\n".join(await self._tools.run(["apt-cache", *self._options, "depends", package]))

    async def unpack(self, *packages: str) -> list[str]:
        """Fetch and unpack packages; returns their names with versions."""
        await self._tools.run(["apt-get", *self._options, "download", *packages], cwd=self._work)
        debs = sorted(self._work.glob("*.deb"))
        for deb in debs:
            await self._tools.run(["dpkg", "--extract", str(deb), str(self._tree)])
        return [deb.name.removesuffix(".deb") for deb in debs]

    def find(self, *patterns: str) -> Path:
        """The first unpacked file that is at one of the places; Debian has been moving everything below /usr."""
        found = [path for pattern in patterns for path in sorted(self._tree.glob(pattern))]
        if not found:
            raise StepFailed(f"the packages have no {' or '.join(patterns)}")
        return found[0]
