"""The loop thread: one iteration a step, the only writer of the scheduler."""
