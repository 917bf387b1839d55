"""Feedback: what users, judges and tests say of answers, kept in Redis until it is too old."""
