"""Liveness, readiness, load, and gauges that are read at a scrape."""
