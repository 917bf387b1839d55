"""What services share. No torch."""
