"""/v1/embeddings and /v1/score: requests that only read their prompts."""
