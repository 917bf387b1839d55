"""Cards that people have: what each one's memory holds, and how fast it decodes, measured or predicted."""
