"""Cost of rounding in quality: stored weights, KV, states, products of prompts."""
