"""Training sessions: a researcher's own loop, call by call, beside the jobs of the same trainer thread."""
