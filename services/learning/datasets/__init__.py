"""Data sets: immutable versions of rows made from feedback, the request log and files, for training jobs."""
