"""Validation of the simulator: four real engines and a simulation of them play one trace."""
