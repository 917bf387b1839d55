"""Histories: what clients asked and were told while things broke, and whether some order of it makes sense."""
