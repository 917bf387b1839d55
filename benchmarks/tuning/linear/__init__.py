"""Searches over products: shapes, formats, variants."""
