"""Request bodies. Strict: unknown fields, wrong types, NaN and infinity are refused by name."""
