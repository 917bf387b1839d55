"""Copies between tiers in the background."""
