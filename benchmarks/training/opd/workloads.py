"""Workloads of on-policy distillation, for this project's jobs and for TRL's trainer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from benchmarks.lib.in_process import Prompt

RANK, MODULES = 16, ["q_proj", "v_proj"]


@dataclass(frozen=True, slots=True)
class Workload:
    """Samples of a step."""

    name: str
    prompts: int
    """Different ones."""
    per_step: int
    shortest: int
    longest: int
    """Tokens of a prompt."""
    new_tokens: int
    sampling_temperature: float

    def make_prompts(self, vocab_size: int) -> list[Prompt]:
        """Random tokens, the same each time."""
        random = np.random.default_rng(0)
        lengths = random.integers(self.shortest, self.longest + 1, self.prompts).tolist()
        return [tuple(random.integers(0, vocab_size, length).tolist()) for length in lengths]

    def on_the_tiny_model(self) -> Workload:
        """Short enough for a CPU."""
        return replace(
            self, shortest=min(self.shortest, 48), longest=min(self.longest, 48), new_tokens=min(self.new_tokens, 24)
        )


WORKLOADS = {
    "gkd": Workload("gkd", 32, 1, 4, 8, 8, 0.0),
    "real": Workload("real", 64, 8, 512, 512, 256, 1.0),
}
