"""/v1/adapters: list, upload, versions, attach, merge."""
