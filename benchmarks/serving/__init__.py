"""The engine alone: decode and prefill rates, latency, start, sizing, the scheduler in simulated time."""
