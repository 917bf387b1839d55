"""What benchmarks.training.learning measures besides what is said, and its plot."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.lib.random_checkpoint import TINY
from benchmarks.training.learning import Curve, Point, ordered, plot
from models.tiny.recipe.skills import dates
from services.common.queue.records import SPEC
from services.trainer.jobs import prepare_run
from services.trainer.jobs.preference_run import PreferenceRun
from tests.training_support import TrainingHost
from tests.unit.trainer.jobs.test_preferences_learn import pair

ITEMS = 6


def test_ordered_is_by_the_log_probabilities_that_dpo_compares() -> None:
    torch.set_num_threads(1)
    host = TrainingHost(TINY)
    items = dates.items(0, ITEMS, held_out=True)
    pairs = [pair(item) for item in items]
    job = {"kind": "dpo", "adapter": "dates", "examples": pairs, "eval_examples": pairs, "batch_size": ITEMS}
    run = prepare_run(SPEC.validate_python(job | {"learning_rate": 3e-3, "eval_every": 9}), host, None)
    assert isinstance(run, PreferenceRun)
    found = []
    for index in range(2):
        documents = [document for example in run._held_out for document in example]
        scores = run._score(run._pack(documents), run.lora, lambda: None)
        logprobs = [float(scores[document.source]) for document in documents]
        found.append(sum(right > late for right, late in zip(logprobs[::2], logprobs[1::2], strict=True)) / ITEMS)
        assert ordered(host, run, items) == found[-1]
        if index == 0:
            run.step(0)
    assert 0 < found[0] < found[1]  # it has learnt in between, so that both sides had something to say


def test_a_plot_of_both_measures(tmp_path: Path) -> None:
    curves = [Curve("sft", seed, (Point(0, 0.5, 0.4), Point(2, 0.9, 1.0)), 1.0) for seed in range(2)]
    plot(curves, tmp_path / "learning.png")
    assert (tmp_path / "learning.png").read_bytes().startswith(b"\x89PNG")
