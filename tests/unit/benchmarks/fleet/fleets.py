"""A small subject for tests of the fleet simulator."""

from __future__ import annotations

from benchmarks.fleet.cost import DECODES, PREFILL, CostModel
from benchmarks.fleet.subject import Subject
from services.engine.scheduler.config import SchedulerConfig

SMALL = Subject(
    "small",
    SchedulerConfig(
        max_num_seqs=8, token_budget=1024, block_size=16, num_blocks=4096, num_slots=72, max_model_len=16384
    ),
    CostModel(
        tuple(0.01 + 1e-4 * decodes for decodes in DECODES), tuple(1e-3 + 5e-5 * tokens for tokens in PREFILL), 0.0, 0.0
    ),
    cost_error=0.0,
    adapter_slots=4,
    adapter_bytes=10**8,
    start_seconds=2.0,
    dollars_per_hour=2.0,
)
