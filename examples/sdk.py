"""The SDK without a server: put data in, watch code run, try two ideas in copies, take a chart out.

    python examples/sdk.py [URL]

With the address of a server, such as http://127.0.0.1:8000, the sandboxes are there instead of in this process.
Copies need a server with `mcp-sandbox --toolsets advanced serve`.
"""

# ruff: noqa: T201 - an example may print

import sys

from mcp_sandbox import Sandbox
from mcp_sandbox.views import OutputPage

SALES = "month,units\n1,120\n2,135\n3,128\n4,160\n"
LOAD = """\
import pandas as pd
for line in open("sales.csv"):
    print("read", line, end="", flush=True)
sales = pd.read_csv("sales.csv")
int(sales.units.sum())"""
FITS = {"a line": 1, "a parabola": 2}
FIT = """\
import numpy as np
np.polyval(np.polyfit(sales.month, sales.units, {degree}), 5).round().item()"""
DRAW = """\
import matplotlib.pyplot as plt
plt.bar(sales.month, sales.units)
plt.show()"""


def main(base_url: str | None) -> None:
    """The whole tour."""
    with Sandbox("python-data-analysis", base_url=base_url) as box:
        box.files.write("sales.csv", SALES)
        for event in box.stream(LOAD):
            if isinstance(event, OutputPage):
                print(event.text, end="")
            else:
                print(f"sum: {event.displays[0].data['text/plain']}, after {event.metrics.run_ms:.0f} ms")
        for copy, (name, degree) in zip(box.fork(len(FITS)), FITS.items(), strict=True):
            print(f"{name} says {copy.run(FIT.format(degree=degree)).output.strip()} for month 5")
            copy.close()
        [chart] = box.run(DRAW).artifacts
        print(f"The chart is in {box.files.download(chart.path, 'chart.png')}.")


main(sys.argv[1] if len(sys.argv) > 1 else None)
