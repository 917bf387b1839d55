"""Commands of feedback, and of what is learnt from it."""
