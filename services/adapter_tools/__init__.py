"""Adapters as matrices and files: merged, extracted into a checkpoint, renamed. Needs torch, but no engine, no GPU."""
