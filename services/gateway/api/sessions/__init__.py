"""/v1/sessions: cached conversations."""
