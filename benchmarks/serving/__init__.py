"""The engine alone: decode and prefill rates, latency, start, the scheduler in simulated time."""
