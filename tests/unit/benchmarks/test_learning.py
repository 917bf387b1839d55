"""What benchmarks.learning measures besides what is said, and its plot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.learning import Curve, Point, ordered, plot
from benchmarks.random_checkpoint import TINY
from models.tiny.recipe.skills import dates
from tests.training_support import TrainingHost
from tests.unit.trainer.test_preferences_learn import HELD_OUT, preferred, prepared


@pytest.mark.parametrize("seed", [0, 2])
def test_ordered_is_by_the_log_probabilities_that_dpo_compares(seed: int) -> None:
    torch.set_num_threads(1)
    host = TrainingHost(TINY)
    items = dates.items(seed, HELD_OUT, held_out=True)
    run = prepared(host, "dpo", seed)
    before = ordered(host, run, items)
    assert before == preferred(run)[0] < 0.65
    for index in range(2):
        run.step(index)
    assert ordered(host, run, items) == preferred(run)[0] > before


def test_a_plot_of_both_measures(tmp_path: Path) -> None:
    curves = [Curve("sft", seed, (Point(0, 0.5, 0.4), Point(2, 0.9, 1.0)), 1.0) for seed in range(2)]
    plot(curves, tmp_path / "learning.png")
    assert (tmp_path / "learning.png").read_bytes().startswith(b"\x89PNG")
