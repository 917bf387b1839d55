"""The engine's process: wires engine and trainer together."""
