"""The benchmark of agents runs, in its smallest form, and its figures are what they say."""

from __future__ import annotations

import pytest
import torch

from benchmarks.lib.random_checkpoint import TINY
from benchmarks.training.environments.agents import SMALL, Reading, Variant, measure
from benchmarks.training.pod import training_pod
from services.engine.observability.events import EventStream


def test_a_step_in_turn_and_ahead() -> None:
    reading = Reading()
    room = SMALL.trajectory + 64
    size = SMALL.groups * SMALL.episodes
    with training_pod(
        TINY,
        "cpu",
        events=EventStream(reading.listen),
        max_num_seqs=size,
        max_lora_rank=16,
        max_train_tokens=room,
        max_model_len=room,
    ) as pod:
        torch.set_num_threads(1)
        for staleness in (0, 1):
            line = measure(
                pod, SMALL, reading, Variant(staleness, 0.0, 256, "selective"), seconds=0, warm_up=staleness, most=3
            )
            assert line["steps"] == 1
            assert line["episodes"] == size
            assert line["turns"] == SMALL.turns
            assert line["staleness_mean"] == line["staleness"] == staleness
            assert (line["max_tokens_per_microbatch"], line["recompute"]) == (256, "selective")
            split = line["split"]
            assert min(split.values()) >= 0
            assert split["waiting"] + split["training"] + split["other"] == pytest.approx(
                line["step_seconds"], abs=1e-3
            )
            # No prompt and no turn is read twice; members whose answers are the same share more.
            assert 0 < line["prefilled_once"] <= 1.01
            assert line["prefix_hits"] > 0.5
