"""Bytes of an entry: header, spans, checksums."""
