"""The commands of `temper`, one module a group."""
