"""Runners: execute a step plan on a device."""
