"""Dry runs: what they report, and the guard rails that they and real jobs are looked at by."""
