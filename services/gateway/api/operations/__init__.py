"""Operations: probes, metrics, and what runs now."""
