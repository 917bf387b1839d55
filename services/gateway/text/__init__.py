"""From token ids to what a client reads: text, reasoning, tool calls."""
