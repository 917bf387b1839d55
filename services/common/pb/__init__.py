"""Generated from proto/temper/v1 by proto/generate.py (`make proto`)."""
