"""Which adapter version is in which slot: pins, downloads, the flip of an alias."""
