"""Fields that several bodies have."""
