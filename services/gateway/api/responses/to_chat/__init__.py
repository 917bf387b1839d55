"""A response's input as a chat request."""
