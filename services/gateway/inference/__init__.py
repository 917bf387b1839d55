"""Inference: a parsed request becomes engine requests, and their tokens text. Knows no HTTP."""
