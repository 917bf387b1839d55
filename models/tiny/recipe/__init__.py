"""How models/tiny was made: data, tokenizer, training, evaluation. Seeded, so that it can be made again."""
