"""A tiny guest: a few instructions that add two numbers under KVM. `vmm.probe` runs this file as a program.

It needs neither QEMU nor a kernel, and prints OK or what went wrong. The caller must be ready to kill it: with a broken
KVM it may never end. It imports nothing of ours, so that any Python can run it by its path.
"""

import ctypes
import fcntl
import mmap
import os
import struct
import sys

OK = "the tiny guest answered"

# Constants from <linux/kvm.h>.
GET_API_VERSION, CREATE_VM, GET_VCPU_MMAP_SIZE, GET_SUPPORTED_CPUID = 0xAE00, 0xAE01, 0xAE04, 0xC008AE05
SET_MEMORY, SET_TSS_ADDRESS, CREATE_VCPU = 0x4020AE46, 0xAE47, 0xAE41
RUN, SET_REGISTERS, SET_CPUID = 0xAE80, 0x4090AE82, 0x4008AE90
GET_SYSTEM_REGISTERS, SET_SYSTEM_REGISTERS = 0x8138AE83, 0x4138AE84
API_VERSION = 12
EXITS = {2: "a port access", 5: "a halt", 8: "a triple fault", 9: "a refused entry", 17: "an internal error"}
PORT_ACCESS, HALT, INTERNAL_ERROR = 2, 5, 17
EMULATION_FAILED = 1  # the reason for an internal error

# The guest's memory: its code, and page tables that map the first 2 MB to themselves.
MEMORY_BYTES, CODE, TABLES = 0x10000, 0x1000, (0x2000, 0x3000, 0x4000)
TSS_ADDRESS = 0x10000000  # Intel's KVM wants three pages that the guest does not use
PRESENT_AND_WRITABLE, LARGE_PAGE = 3, 0x80

# Vector instructions compute the sum: every 64-bit CPU has them, and KVM's instruction emulator does not. A paravirtual
# KVM, which emulates ordinary guests instead of running them, fails here.
PORT, LEFT, RIGHT = 0xE9, 40, 2
PROGRAM = bytes.fromhex(
    "660f6ec0"  # movd xmm0, eax
    "660f6ecb"  # movd xmm1, ebx
    "660ffec1"  # paddd xmm0, xmm1
    "660f7ec0"  # movd eax, xmm0
    "66bae900"  # mov dx, 0xe9
    "ee"  # out dx, al
    "f4"  # hlt
)


def main() -> str:
    """Run the guest; return OK, or what went wrong."""
    kvm = os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC)
    if (version := fcntl.ioctl(kvm, GET_API_VERSION)) != API_VERSION:
        return f"its API has version {version}, not {API_VERSION}"
    machine = fcntl.ioctl(kvm, CREATE_VM, 0)
    fcntl.ioctl(machine, SET_TSS_ADDRESS, TSS_ADDRESS)
    memory = _fill_memory()
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    fcntl.ioctl(machine, SET_MEMORY, struct.pack("<IIQQQ", 0, 0, 0, MEMORY_BYTES, address))
    cpu = fcntl.ioctl(machine, CREATE_VCPU, 0)
    shared = mmap.mmap(cpu, fcntl.ioctl(kvm, GET_VCPU_MMAP_SIZE))
    _set_cpuid(kvm, cpu)
    _enter_long_mode(cpu)
    return _watch(cpu, shared)


def _fill_memory() -> mmap.mmap:
    memory = mmap.mmap(-1, MEMORY_BYTES)
    memory[CODE : CODE + len(PROGRAM)] = PROGRAM
    for table, target in zip(TABLES, (*TABLES[1:], LARGE_PAGE), strict=True):
        struct.pack_into("<Q", memory, table, target | PRESENT_AND_WRITABLE)
    return memory


def _set_cpuid(kvm: int, cpu: int) -> None:
    """Give the guest all features of this CPU."""
    most = 256
    features = bytearray(8 + 40 * most)
    struct.pack_into("<I", features, 0, most)
    fcntl.ioctl(kvm, GET_SUPPORTED_CPUID, features)
    fcntl.ioctl(cpu, SET_CPUID, features)


def _enter_long_mode(cpu: int) -> None:
    """Set up 64-bit mode with paging and vector registers, as in a running kernel."""
    state = bytearray(312)
    fcntl.ioctl(cpu, GET_SYSTEM_REGISTERS, state)
    state[0:24] = _segment(selector=8, kind=11, is_64_bit=1)  # code
    for at in range(24, 6 * 24, 24):
        state[at : at + 24] = _segment(selector=16, kind=3, is_64_bit=0)  # data
    protected_paging, pae_vectors, long_mode = 0x80050033, 0x620, 0x500
    struct.pack_into("<4Q", state, 224, protected_paging, 0, TABLES[0], pae_vectors)  # CR0, CR2, CR3, CR4
    struct.pack_into("<Q", state, 264, long_mode)  # EFER
    fcntl.ioctl(cpu, SET_SYSTEM_REGISTERS, bytes(state))
    rax_rbx, others, rip, rflags = (LEFT, RIGHT), [0] * 14, CODE, 2
    fcntl.ioctl(cpu, SET_REGISTERS, struct.pack("<18Q", *rax_rbx, *others, rip, rflags))


def _segment(*, selector: int, kind: int, is_64_bit: int) -> bytes:
    """Return a segment of all memory at kernel privilege."""
    base, limit, present, privilege, granularity = 0, 0xFFFFFFFF, 1, 0, 1
    return struct.pack(
        "<QIH10B",
        *(base, limit, selector, kind, present, privilege),
        *(1 - is_64_bit, 1, is_64_bit, granularity, 0, 0, 0),
    )


def _watch(cpu: int, shared: mmap.mmap) -> str:
    """Run the guest until it has answered and halted."""
    answer = None
    for expected in (PORT_ACCESS, HALT):
        fcntl.ioctl(cpu, RUN, 0)
        [reason] = struct.unpack_from("<I", shared, 8)
        if reason == INTERNAL_ERROR and struct.unpack_from("<I", shared, 32)[0] == EMULATION_FAILED:
            return "this KVM is paravirtual and cannot run ordinary guests"
        if reason != expected:
            return f"the guest stopped with {EXITS.get(reason, f'exit {reason}')} instead of {EXITS[expected]}"
        if reason == PORT_ACCESS:
            [place] = struct.unpack_from("<Q", shared, 40)
            answer = shared[place]
    return OK if answer == LEFT + RIGHT else f"the guest computed {LEFT} + {RIGHT} = {answer}"


if __name__ == "__main__":
    try:
        sys.stdout.write(main())
    except OSError as error:
        sys.stdout.write(f"creating a guest failed: {error.strerror}")
