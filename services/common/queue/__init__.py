"""Jobs and batches in Redis: submission, claims, fencing tokens, hand-back, dead letters."""
