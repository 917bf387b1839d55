"""Text of answers: token ids become what a client reads, which is text, reasoning and tool calls."""
