"""Chat templates and tokenizer: text to token ids, the same for serving and for training."""
