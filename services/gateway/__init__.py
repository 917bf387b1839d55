"""The gateway: HTTP and text in front of engines. No torch."""
