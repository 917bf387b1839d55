"""OpenAI's Responses API as a translation over chat completions."""
