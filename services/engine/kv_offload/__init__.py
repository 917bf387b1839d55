"""Offload of cache entries below the device: host memory, disk, object store."""
