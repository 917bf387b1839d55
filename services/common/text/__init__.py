"""Text: chat templates and tokenizer for prompts, reasoning and tool calls of answers, the same everywhere."""
