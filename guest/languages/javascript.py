"""JavaScript and TypeScript, in Node.js."""

# pathlib costs imports and instructions, which an emulated CPU makes expensive
# ruff: noqa: PTH100, PTH118, PTH120

import os

from guest.kernels import hosted
from guest.languages import Language

LANGUAGE = Language(
    title="JavaScript",
    template="javascript",
    image="docker.io/library/node:24-slim",
    suffixes=(".js", ".mjs", ".ts", ".mts"),
    memory_mb=512,
    version=("node", "--version"),
    warm_cells=("1 + 1", "console.log(await Promise.resolve(1))", "throw new Error('warm')", "let x: number = 1"),
    rehearsal=None,
    settling_code=";",
    stateful=True,
)
HOST = os.path.join(os.path.dirname(os.path.abspath(__file__)), "javascript.js")


def command(memory_mb: int) -> list[str]:
    """Return the command."""
    # The machine ends what exceeds its memory, with a clear message, before V8 does.
    limit = [f"--max-old-space-size={memory_mb}"] if memory_mb else []
    # A callback that an interrupt ends leaves its entry on the stack of asynchronous contexts, which is harmless.
    return ["node", "--no-warnings", "--no-force-async-hooks-checks", *limit, HOST]


def kernel() -> hosted.Service:
    """Return the kernel. Nothing can reseed the generators of V8 and OpenSSL in a running Node.js."""
    return hosted.Service(command, restarts=True)
