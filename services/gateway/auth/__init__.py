"""Who may do what: API keys, scopes, the audit log."""
