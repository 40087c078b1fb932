"""What a client gets when code fails, exits, never ends, prints too much, or uses a closed sandbox.

python examples/when_code_misbehaves.py
"""

# ruff: noqa: T201 - an example may print

import os
import sys
from pathlib import Path

import anyio
from mcp import Client, StdioServerParameters
from mcp_types import TextContent

SERVER = Path(sys.executable).with_name("mcp-sandbox")  # the console script of this environment
CASES = {
    "an exception is a result, with its traceback": "kept = 42\n1 / 0",
    "so is an exit": "import sys\nsys.exit(3)",
    "a run over its time limit is interrupted, and variables are kept": "while True: pass",
    "the variable is still there": "kept",
    "long output is shown from both ends, with the call that reads the rest": 'print("x" * 100_000)',
}
SHOWN_CHARS = 200  # of a line


async def main() -> None:
    """One sandbox, one case after the other."""
    server = StdioServerParameters(command=str(SERVER), env=dict(os.environ))
    async with Client(server) as client:

        async def call(tool: str, arguments: dict[str, object]) -> str:
            result = await client.call_tool(tool, arguments)
            return "\n".join(block.text for block in result.content if isinstance(block, TextContent))

        created = await client.call_tool("create_sandbox", {})
        if created.structured_content is None:
            raise SystemExit(str(created.content))
        box = created.structured_content["sandbox_id"]
        for title, code in CASES.items():
            text = await call("run_code", {"sandbox_id": box, "code": code, "timeout_s": 5})
            shown = "\n".join(line[:SHOWN_CHARS] for line in text.splitlines())
            print(f"--- {title}\n{shown}\n")
        await call("close_sandbox", {"sandbox_id": box})
        print("--- a sandbox that is gone says so, and what to do")
        print(await call("run_code", {"sandbox_id": box, "code": "kept"}))


anyio.run(main)
