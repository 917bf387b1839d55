"""Chaos: a whole Temper under traffic and jobs, with processes killed and every connection between them broken."""
