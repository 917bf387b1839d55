"""Autotuner: configurations of a decode step's kernels, measured inside the captured step on the user's own GPU."""
