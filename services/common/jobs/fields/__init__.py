"""Parts that specifications of several kinds of job have in common."""
