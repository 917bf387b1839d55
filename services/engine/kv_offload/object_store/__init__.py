"""The tier in the object store."""
