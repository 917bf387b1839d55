"""Middleware that every HTTP request passes: request id, access, body limits."""
