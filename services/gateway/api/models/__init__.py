"""/v1/models, /tokenize and /detokenize."""
