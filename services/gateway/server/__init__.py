"""The gateway's process: application, HTTP server, shutdown."""
