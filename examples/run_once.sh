#!/bin/sh
# One file in one fresh sandbox, from the shell. Output and exit status are the code's own; what it leaves in
# /tmp/outputs, and every figure it draws, is saved on this side.
#
#     examples/run_once.sh [DIRECTORY]
set -eu

mcp-sandbox run --timeout 60 --save "${1:-outputs}" - <<'PYTHON'
import numpy as np
import matplotlib.pyplot as plt

steps = np.random.default_rng().normal(size=500)
print("the walk ends at", round(float(steps.sum()), 1))
plt.plot(steps.cumsum())
with open("/tmp/outputs/steps.csv", "w") as file:
    np.savetxt(file, steps)
PYTHON
