"""Soak: a whole Temper under mixed traffic for a long time: memory, handles, disk, store, queue and logs stay flat."""
