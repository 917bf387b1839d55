"""Evaluations as they run: prompts of items, answers of targets, their scores, shard by shard."""
