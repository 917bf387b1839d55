"""Copies of KV blocks, states and rows."""
