"""Kernels, the processes in a machine that run code: one module for each language."""
