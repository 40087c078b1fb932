"""Kernels for monitors that boot only ELF files."""

import gzip
import os
import struct
from pathlib import Path

import pytest

from vmm import vmlinux
from vmm.errors import LaunchFailed


def bzimage(payload: bytes) -> bytes:
    """Return a kernel image with one sector of setup code and this payload."""
    header = bytearray(2 * 512)
    header[vmlinux.SETUP_SECTORS_AT] = 1
    header[vmlinux.MAGIC_AT : vmlinux.MAGIC_AT + 4] = vmlinux.HEADER_MAGIC
    struct.pack_into("<II", header, vmlinux.PAYLOAD_AT, 0, len(payload))
    return bytes(header) + payload


async def test_the_kernel_is_taken_out_of_a_bzimage(tmp_path: Path):
    kernel = tmp_path / "vmlinuz"
    kernel.write_bytes(bzimage(gzip.compress(vmlinux.ELF + b"kernel")))
    file = await vmlinux.uncompressed(kernel)
    try:
        assert os.pread(file, 100, 0) == vmlinux.ELF + b"kernel"
    finally:
        os.close(file)


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (b"", "is not a Linux kernel"),
        (b"x" * 4096, "is not a Linux kernel"),
        (bzimage(b"what is this?"), "compressed in an unknown way"),
        (bzimage(gzip.compress(b"no kernel")), "contains no ELF file"),
        (bzimage(gzip.compress(b"kernel" * 100)[:20]), "cannot be unpacked"),
    ],
)
async def test_what_is_no_kernel_is_refused_with_the_reason(image: bytes, reason: str, tmp_path: Path):
    kernel = tmp_path / "vmlinuz"
    kernel.write_bytes(image)
    with pytest.raises(LaunchFailed, match=reason):
        await vmlinux.uncompressed(kernel)
