"""The nftables tables of machines: one for each, named after its server, so that the next server can remove it."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from vmm.errors import NetworkUnsupported, ToolFailed, ToolMissing
from vmm.hierarchy import pid_namespace, server
from vmm.memory import sealed_bytes
from vmm.network.plan import OWN_NETWORK
from vmm.process import find_tool, run_tool
from vmm.process_table import ProcessId, is_alive

NFT = "nft"
FAMILY = "inet"
TABLE_PREFIX = "mcp-sandbox"
LISTED = re.compile(rf"table {FAMILY} ({TABLE_PREFIX}-(\d+)-(\d+)-(\d+)-\S+)")


def table_name(installation: str, machine_id: str) -> str:
    """Return the name of a machine's table, which says what server it belongs to."""
    return f"{TABLE_PREFIX}-{server()}-{installation}-{machine_id}"


async def load(uplink: str, rules: str) -> None:
    """Put rules into force, all or none; raise NetworkUnsupported if this host's kernel has not what they need."""
    file = sealed_bytes(rules.encode())
    try:
        with _explained():
            await run_tool([*_entered(uplink), NFT, "-f", f"/proc/self/fd/{file}"], pass_fds=[file])
    finally:
        os.close(file)


async def remove(uplink: str, table: str) -> None:
    """Remove a table if it is there."""
    await run_tool([*_entered(uplink), NFT, f"add table {FAMILY} {table}; delete table {FAMILY} {table}"])


async def sweep(uplink: str = OWN_NETWORK) -> list[str]:
    """Remove the tables of servers that were killed, of any home; return their names.

    Tables of another pid namespace are left alone: from here their servers always look dead.
    """
    if os.geteuid() != 0 or find_tool(NFT) is None:
        return []
    lines: list[str] = []
    try:
        await run_tool([*_entered(uplink), NFT, "list", "tables"], on_line=lines.append)
        removed = [table for table in map(_dead, lines) if table]
        for table in removed:
            await remove(uplink, table)
    except ToolFailed:  # this kernel has no nftables, or another server was quicker
        return []
    return removed


def _dead(line: str) -> str | None:
    """Return the table in a line of nft's list if its server is dead."""
    found = LISTED.fullmatch(line.strip())
    if found is None or int(found[4]) != pid_namespace() or is_alive(ProcessId(int(found[2]), int(found[3]))):
        return None
    return found[1]


def _entered(uplink: str) -> list[str]:
    return ["nsenter", f"--net={uplink}"]


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except ToolMissing as error:
        raise NetworkUnsupported(f"network mode nat needs {error.program}: apt-get install nftables") from error
    except ToolFailed as error:
        raise NetworkUnsupported(f"this host's nftables refuses the rules of network mode nat: {error.gist}") from error
