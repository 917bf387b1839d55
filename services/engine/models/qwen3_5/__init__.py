"""Qwen3.5: plain forward, fused forward, training forward."""
