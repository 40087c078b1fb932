"""Values of runs: requests, bookkeeping, output and results. `sandboxes` executes them."""
