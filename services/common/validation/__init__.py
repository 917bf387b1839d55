"""Rules of request fields, in pydantic and as JSON Schema."""
