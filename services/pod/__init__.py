"""Pod: the process that wires engine and trainer together."""
