"""Every LoRA gradient of a GRPO step on trajectories equals a plain transformers + PEFT backward of the formula."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.jobs import GrpoJob, SftJob
from services.engine.models.lora.binding import bind_adapter
from services.engine.models.lora.trainable import LoraParams
from services.engine.models.qwen3_5.model import Qwen3_5
from services.trainer.jobs.grpo_run import GrpoRun
from services.trainer.jobs.sft import SftRun
from tests.tokenizer_support import qwen_like_tokenizer
from tests.training_support import (
    TrainingHost,
    assert_same_gradients,
    gradients,
    peft_reference,
    random_adapter,
    reference_logprobs,
    write_checkpoint,
)

CLIP_LOW, CLIP_HIGH = 0.1, 0.15
WEIGHT = 0.05
"""Of observations."""


def episodes(prompt: int) -> list[dict[str, Any]]:
    """A group: three trajectories of one to three turns behind the same prompt; turns differ in temperature, the second
    one's rewards in their place, and the third begins its context anew."""
    generator = torch.Generator().manual_seed(3)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, 400, (count,), generator=generator).tolist()

    def act(count: int, **fields: Any) -> dict[str, Any]:
        return {"type": "action", "token_ids": tokens(count), "temperature": 0.8 if count % 2 else 1.0, **fields}

    def see(count: int, **fields: Any) -> dict[str, Any]:
        return {"type": "observation", "token_ids": tokens(count), **fields}

    first = see(prompt)
    return [
        {"segments": [first, act(5), see(30), act(64), see(7), act(2)], "reward": 1.0},
        {"segments": [first, act(9, reward=0.5), see(3), act(20, reward=-0.25)]},
        {"segments": [first, act(4), see(12, restarts=True), act(11)], "reward": 0.25},
    ]


def reference_group(group: list[dict[str, Any]], level: str, discount: float) -> list[list[float]]:
    """Advantages of the turns, written down without the code under test."""
    returns = []
    for one in group:
        rewards = [segment.get("reward", 0.0) for segment in one["segments"] if segment["type"] == "action"]
        rewards[-1] += one.get("reward", 0.0)
        returns.append(
            [sum(discount**k * reward for k, reward in enumerate(rewards[turn:])) for turn in range(len(rewards))]
        )
    found = []
    for member in returns:
        advantages = []
        for turn in range(len(member)):
            at = turn if level == "turn" else 0
            values = [other[min(at, len(other) - 1)] for other in returns]
            advantages.append((member[at] - statistics.mean(values)) / (statistics.stdev(values) + 1e-4))
        found.append(advantages)
    return found


@pytest.mark.parametrize(
    ("loss_type", "level", "discount", "recompute"),
    [
        ("dapo", "trajectory", 1.0, "none"),
        ("grpo", "turn", 0.9, "full"),
        ("dr_grpo", "trajectory", 0.5, "selective"),
    ],
)
@pytest.mark.parametrize("branches", ["apart", "shared"])
def test_trajectory_gradients(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    loss_type: str,
    level: str,
    discount: float,
    recompute: str,
    branches: str,
) -> None:
    torch.set_num_threads(1)
    if branches == "apart":
        monkeypatch.setattr(Qwen3_5, "shares_prefixes", False)
    directory = write_checkpoint(tmp_path, qwen_like_tokenizer(), initializer_range=0.1)
    host = TrainingHost(directory, max_train_tokens=1024)
    adapter = random_adapter(host)
    model = peft_reference(directory, adapter, tmp_path / "adapter")
    group = episodes(40)
    advantages = reference_group(group, level, discount)

    generator = torch.Generator().manual_seed(4)
    losses, lengths, seen = [], [], []
    for one, turns in zip(group, advantages, strict=True):
        text: list[int] = []
        number, mine = 0, []
        for segment in one["segments"]:
            if segment.get("restarts"):
                text = []
            ids = segment["token_ids"]
            if segment["type"] == "observation" and text and level == "turn":
                seen.append(-reference_logprobs(model, text + ids, len(text)).sum())
            if segment["type"] == "action":
                logprobs = reference_logprobs(model, text + ids, len(text), segment["temperature"])
                noise = 0.3 * torch.randn(len(ids), generator=generator)
                segment["logprobs"] = (logprobs.detach() + noise).clamp(max=0.0).tolist()
                ratio = (logprobs - torch.tensor(segment["logprobs"])).exp()
                bounded = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
                mine.append(-torch.minimum(ratio * turns[number], bounded * turns[number]))
                number += 1
            text = text + segment["token_ids"]
        losses.append(torch.cat(mine))
        lengths.append(len(losses[-1]))
    if loss_type == "dapo":
        total = torch.cat(losses).mean()
    else:
        divisors = lengths if loss_type == "grpo" else [100] * len(lengths)
        total = sum((loss.sum() / by for loss, by in zip(losses, divisors, strict=True)), torch.zeros(())) / 3
    if level == "turn":
        total = total + WEIGHT * torch.stack(seen).sum() / sum(lengths)
    total.backward()

    spec = GrpoJob.model_validate(
        {
            "adapter": "a",
            "groups": [{"trajectories": group}],
            "loss_type": loss_type,
            "advantage": level,
            "discount": discount,
            "clip_low": CLIP_LOW,
            "clip_high": CLIP_HIGH,
            "recompute": recompute,
            "observation_weight": WEIGHT if level == "turn" else 0,
            "max_tokens_per_microbatch": 200 if branches == "apart" else 1024,
            **({"max_completion_length": 100} if loss_type == "dr_grpo" else {}),
        }
    )
    run = GrpoRun.prepare(spec, host, adapter)
    metrics, inputs = run._accumulate(0, lambda: None)
    sizes = [document.length - 1 for document in run.batch(0)]
    # The prompt of 40 tokens, and nothing of the sequence that begins anew.
    assert inputs == sum(sizes) - (0 if branches == "apart" else 2 * 40)
    assert metrics["loss"] == pytest.approx(float(total.detach()), rel=1e-4, abs=1e-6)
    assert metrics["completion_length_mean"] == pytest.approx(statistics.mean(lengths))
    assert metrics["clip_fraction_low"] > 0
    assert_same_gradients(gradients(run.lora), model)


@pytest.mark.parametrize("weight", [0.0, 0.05])
def test_sft_on_trajectories(tmp_path: Path, weight: float) -> None:
    """The loss is on the actions, and at a weight on observations behind the first one, over the tokens of actions."""
    torch.set_num_threads(1)
    directory = write_checkpoint(tmp_path, qwen_like_tokenizer(), initializer_range=0.1)
    host = TrainingHost(directory, max_train_tokens=1024)
    adapter = random_adapter(host)
    model = peft_reference(directory, adapter, tmp_path / "adapter")
    examples = episodes(40)
    sums, count = [], 0
    for one in examples:
        text: list[int] = []
        acted = False
        for segment in one["segments"]:
            if segment.get("restarts"):
                text, acted = [], False
            ids = segment["token_ids"]
            factor = 1.0 if segment["type"] == "action" else weight * acted
            if factor:
                sums.append(-factor * reference_logprobs(model, text + ids, len(text)).sum())
            if segment["type"] == "action":
                count += len(ids)
                acted = True
            text = text + ids
    total = torch.stack(sums).sum() / count
    total.backward()
    spec = SftJob.model_validate(
        {
            "adapter": "a",
            "examples": [{"trajectory": one} for one in examples],
            "batch_size": 3,
            "observation_weight": weight,
            "max_tokens_per_microbatch": 200,
        }
    )
    run = SftRun.prepare(spec, host, adapter)
    metrics, _ = run._accumulate(0, lambda: None)
    assert metrics["loss"] == pytest.approx(float(total.detach()), rel=1e-4)
    assert 0 <= metrics["token_accuracy"] <= 1
    assert_same_gradients(gradients(run.lora), model)


def test_pieces_that_go_on_from_each_other(tmp_path: Path) -> None:
    """Hidden states and gradients of a tree of pieces are those of its sequences, each by itself: pieces of one token,
    of more than a chunk of the recurrence, and behind several others."""
    torch.set_num_threads(1)
    host = TrainingHost(write_checkpoint(tmp_path, qwen_like_tokenizer(), initializer_range=0.1))
    files = random_adapter(host)
    lengths, parents = [40, 33, 1, 70, 2, 35, 1], [None, None, 0, 0, 1, 3, 3]
    tokens = torch.randint(0, 400, (sum(lengths),), generator=torch.Generator().manual_seed(5))
    parts = list(torch.split(tokens, lengths))
    paths = [[2], [4], [5], [6]]
    for path in paths:
        while parents[path[0]] is not None:
            path.insert(0, parents[path[0]])
    found = {}
    for shared in (True, False):
        lora = LoraParams.from_bound(bind_adapter(files, host.model.config, max_rank=32), device=torch.device("cpu"))
        lora.link_gradients()
        sizes = lengths if shared else [sum(lengths[piece] for piece in path) for path in paths]
        inputs = tokens if shared else torch.cat([parts[piece] for path in paths for piece in path])
        hidden = host.model.forward_train(
            inputs, sizes, lora, recompute="none", give_way=lambda: None, parents=parents if shared else None
        )
        rows = list(torch.split(hidden, sizes))
        sequences = [torch.cat([rows[piece] for piece in path]) for path in paths] if shared else rows
        weight = torch.randn(hidden.shape[1], generator=torch.Generator().manual_seed(6))
        torch.cat([(rows @ weight).tanh() for rows in sequences]).sum().backward()
        found[shared] = [rows.detach() for rows in sequences], gradients(lora)
    for one, other in zip(found[True][0], found[False][0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    for name, gradient in found[False][1].items():
        assert float((found[True][1][name] - gradient).norm() / gradient.norm()) <= 1e-4, name
    with pytest.raises(ValueError, match="in the order of their levels"):
        host.model.forward_train(
            tokens, lengths, None, recompute="none", give_way=lambda: None, parents=[None, 0, None, 0, 1, 3, 3]
        )
