"""Parts that benchmarks share: an engine in this process, random checkpoints, timing, result files."""
