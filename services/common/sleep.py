"""Sleep of an engine, as the engine and the gateway tell of it."""

from __future__ import annotations

ASLEEP = "asleep: POST /v1/engine/wake, or `temper engine wake`, has it load the model again"
"""What a sleeping engine answers to everything else."""
