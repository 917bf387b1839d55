"""The trainer: jobs and training sessions in a thread of the engine's process."""
