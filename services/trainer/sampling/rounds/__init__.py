"""Rounds of a job that samples: their prompts and policies, what is cut, what is sampled ahead."""
