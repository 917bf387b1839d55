"""Meaning of JSON Schema keywords that grammars and checks need."""
