"""Text of answers in a stream: token ids become what a client reads, and grammars of tool calls."""
