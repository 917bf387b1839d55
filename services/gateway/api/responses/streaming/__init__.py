"""Events of a streamed response."""
