"""Code that services share. No torch."""
