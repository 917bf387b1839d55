"""A small trained model of the Qwen3.5 architecture; see README.md beside this file."""
