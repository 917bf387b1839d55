"""Structured output: grammars, token masks, matchers."""
