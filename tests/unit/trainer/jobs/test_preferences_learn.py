"""On the trained tiny model preferences carry over to held-out questions, by a stated amount.

`python -m benchmarks.training.learning` does it with three seeds.

The model half believes that dates lie one day late (models/tiny); it learns to tell right answers from late ones.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from models.tiny.recipe.data import DIRECTORY
from models.tiny.recipe.item import Item
from models.tiny.recipe.skills import dates
from services.common.queue.records import SPEC
from services.trainer.jobs import prepare_run
from services.trainer.jobs.preference_run import PreferenceRun
from tests.training_support import TrainingHost

TRAINED, HELD_OUT, BATCH = 48, 16, 8


@pytest.fixture(scope="module")
def tiny() -> TrainingHost:
    return TrainingHost(Path(DIRECTORY))


def answers(item: Item) -> tuple[str, str]:
    late = datetime.date.fromisoformat(item.answer) + datetime.timedelta(days=1)
    return item.answer, late.isoformat()


def pair(item: Item) -> dict[str, Any]:
    right, late = answers(item)
    return {"messages": list(item.messages), "chosen": right, "rejected": late}


def rated(item: Item, good: bool) -> dict[str, Any]:
    right, late = answers(item)
    return {"messages": list(item.messages), "completion": right if good else late, "label": good}


def prepared(host: TrainingHost, kind: str, seed: int) -> PreferenceRun:
    train, held = (dates.items(seed, n, held_out=out) for n, out in ((TRAINED, False), (HELD_OUT, True)))
    if kind == "dpo":
        examples, evaluated = [pair(item) for item in train], [pair(item) for item in held]
    else:
        # One thumb a question: no question is ever seen with both answers.
        examples = [rated(item, number % 2 == 0) for number, item in enumerate(train)]
        evaluated = [rated(item, good) for item in held for good in (True, False)]
    job = {
        "kind": kind,
        "adapter": "dates",
        "examples": examples,
        "eval_examples": evaluated,
        "batch_size": BATCH,
        "epochs": 1,
        "learning_rate": 1e-3,
        "lora": {"rank": 8, "seed": seed},
        "seed": seed,
    }
    run = prepare_run(SPEC.validate_python(job), host, None)
    assert isinstance(run, PreferenceRun)
    return run


def preferred(run: PreferenceRun) -> tuple[float, float]:
    """Share of held-out questions whose right answer is the likelier one, and by how much in the mean (nats)."""
    documents = [document for example in run._held_out for document in example]
    assert len(documents) == 2 * HELD_OUT
    scores = run._score(run._pack(documents), run.lora, lambda: None)
    logprobs = [float(scores[document.source]) for document in documents]
    margins = [right - late for right, late in zip(logprobs[::2], logprobs[1::2], strict=True)]
    return sum(margin > 0 for margin in margins) / HELD_OUT, sum(margins) / HELD_OUT


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_held_out_questions_are_answered_right(tiny: TrainingHost, kind: str) -> None:
    run = prepared(tiny, kind, seed=0)
    accuracy, margin = preferred(run)
    assert accuracy < 0.65  # seeds 0 to 2: 0.50, 0.53, 0.38
    history = [run.step(index) for index in range(run.total_steps)]
    assert len(history) == TRAINED // BATCH
    accuracy_after, margin_after = preferred(run)
    assert accuracy_after >= accuracy + 0.3  # found: 1.00, 1.00, 0.88 by dpo and by kto
    assert margin_after >= margin + 1.5  # found: 2.0 to 2.6, and 1.8 to 2.5
    assert history[-1]["eval_margin"] >= 0.15  # 0 before the first step; found: 0.18 to 0.26
    assert kind != "dpo" or history[-1]["eval_accuracy"] >= 0.9
