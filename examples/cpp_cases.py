"""Have a C++ program judged by test cases: compiled once, run with each input, a verdict for each.

    python examples/cpp_cases.py

Needs the template: mcp-sandbox template build cpp-algorithm. Go works the same way, with go-algorithm.
"""

# ruff: noqa: T201 - an example may print

import os
import sys
from pathlib import Path

import anyio
from mcp import Client, StdioServerParameters
from mcp_types import TextContent

SERVER = Path(sys.executable).with_name("mcp-sandbox")  # the console script of this environment
MEAN = """\
#include <bits/stdc++.h>

int main() {
    long count, number, sum = 0;
    std::cin >> count;
    while (std::cin >> number) sum += number;
    std::cout << sum / count << std::endl;   // rounds towards zero, and nothing has no mean
}"""
CASES = [
    {"stdin": "3\n2 4 6\n", "expected": "4"},
    {"stdin": "2\n-1 -2\n", "expected": "-2"},
    {"stdin": "0\n", "expected": "none"},
]


async def main() -> None:
    """One call, in a sandbox that is made for it and destroyed afterwards."""
    server = StdioServerParameters(command=str(SERVER), env=dict(os.environ))
    async with Client(server) as client:
        asked = {"code": MEAN, "template": "cpp-algorithm", "cases": CASES, "case_timeout_s": 2}
        result = await client.call_tool("run_code", asked)
    text = "\n".join(block.text for block in result.content if isinstance(block, TextContent))
    if result.is_error:
        raise SystemExit(text)
    print(text)


anyio.run(main)
