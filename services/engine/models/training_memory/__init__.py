"""Device memory that training takes beside the engine."""
