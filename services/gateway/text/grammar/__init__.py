"""Grammars of tool calls for constrained decoding."""
