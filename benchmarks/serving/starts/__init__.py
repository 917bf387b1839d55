"""Time until an engine answers: from nothing, with compiled kernels, and out of a sleep."""
