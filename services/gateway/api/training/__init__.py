"""/v1/train: submission of jobs, their state and events."""
