"""Model directories that travel with the repository."""
