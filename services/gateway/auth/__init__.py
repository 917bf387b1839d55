"""Access control of the gateway: API keys, scopes, the audit log."""
