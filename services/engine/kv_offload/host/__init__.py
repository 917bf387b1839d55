"""The tier in host memory."""
