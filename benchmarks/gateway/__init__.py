"""The gateway under load, under hostile requests, and a whole Temper whose processes are killed."""
