"""Rollouts of a job: prompts, rounds, scored completions, the teacher."""
