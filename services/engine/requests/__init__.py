"""What a request asks for and what it is told: plain data."""
