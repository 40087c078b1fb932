"""Take the uncompressed kernel out of a bzImage: Firecracker boots only that.

A bzImage is a small loader followed by the compressed kernel. Its header, the Linux boot protocol, says where that is.
"""

import os
import struct
from pathlib import Path

from vmm.errors import LaunchFailed, ToolFailed
from vmm.memory import new_memory, sealed_bytes
from vmm.process import run_tool
from vmm.trust import read_trusted

ELF = b"\x7fELF"
HEADER_MAGIC, MAGIC_AT = b"HdrS", 0x202
SETUP_SECTORS_AT, PAYLOAD_AT, LENGTH_AT = 0x1F1, 0x248, 0x24C
SECTOR = 512
SIZE_BYTES = 4  # of the uncompressed kernel, which Linux appends; in gzip it is part of the format
OWN_KERNEL = "set guest_kernel to an uncompressed vmlinux"
# By the first bytes of what they have compressed. Debian's kernels use the first two.
TOOLS = {b"\x02\x21\x4c\x18": "lz4", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"\x1f\x8b\x08": "gzip"}


async def uncompressed(kernel: Path) -> int:
    """Return a descriptor of a kernel as an ELF file; raise LaunchFailed if it cannot be unpacked here."""
    image = read_trusted(kernel)
    if image.startswith(ELF):
        return sealed_bytes(image)
    if image[MAGIC_AT : MAGIC_AT + len(HEADER_MAGIC)] != HEADER_MAGIC:
        raise LaunchFailed(f"{kernel} is not a Linux kernel for x86-64; {OWN_KERNEL}")
    offset, length = struct.unpack_from("<II", image, PAYLOAD_AT)
    start = (image[SETUP_SECTORS_AT] + 1) * SECTOR + offset
    payload = image[start : start + length]
    tool = next((tool for magic, tool in TOOLS.items() if payload.startswith(magic)), None)
    if tool is None:
        raise LaunchFailed(f"{kernel} is compressed in an unknown way; {OWN_KERNEL}")
    return await _unpack(kernel, payload if tool == "gzip" else payload[:-SIZE_BYTES], tool)


async def _unpack(kernel: Path, payload: bytes, tool: str) -> int:
    packed, unpacked = sealed_bytes(payload), new_memory(0)
    try:
        await run_tool(
            ["sh", "-c", f"{tool} -dc </proc/self/fd/{packed} >/proc/self/fd/{unpacked}"], pass_fds=[packed, unpacked]
        )
        found = os.pread(unpacked, len(ELF), 0)
    except BaseException as error:
        os.close(unpacked)
        if isinstance(error, ToolFailed):
            raise LaunchFailed(f"{kernel} cannot be unpacked: {error.gist}; install {tool}, or {OWN_KERNEL}") from error
        raise
    finally:
        os.close(packed)
    if found != ELF:
        os.close(unpacked)
        raise LaunchFailed(f"{kernel} contains no ELF file; {OWN_KERNEL}")
    return unpacked
