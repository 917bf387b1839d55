"""With exact_forward every LoRA gradient is that of the formula with the engine's values in place of the forward's own:
a plain transformers + PEFT backward, in which log-probabilities are substituted, is the reference."""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.common.jobs import GrpoJob
from services.trainer.host.rollouts import ScoreRequest
from services.trainer.jobs.grpo_run import GrpoRun
from services.trainer.sampling.replay import with_values
from tests.parity.test_grpo_gradients import CLIP_HIGH, CLIP_LOW, SCALE, rollouts
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

Key = tuple[bool, tuple[int, ...]]


@dataclass
class Scripted:
    """An engine that says what it is told, and only where it may be asked."""

    host: TrainingHost
    says: Mapping[Key, Tensor]
    """By whether it is the job's policy, and the tokens."""
    asked: list[tuple[bool, int]] = field(default_factory=list)

    def check(self, prompt_tokens: int, max_tokens: int) -> None:
        assert prompt_tokens > 0
        assert max_tokens > 0

    @contextmanager
    def policy(self, lora: Any, interrupt: Callable[[], None]) -> Iterator[Any]:
        assert not self.host.gate.inside
        interrupt()
        yield lora

    def score(
        self, requests: Sequence[ScoreRequest], policy: Any, *, interrupt: Callable[[], None]
    ) -> list[array[float]]:
        assert not self.host.gate.inside, "the engine cannot run while the trainer has the device"
        interrupt()
        self.asked.append((policy is not None, len(requests)))
        return [array("f", self.says[policy is not None, one.prompt + one.completion].tolist()) for one in requests]


def test_values_are_taken_to_the_bit() -> None:
    """Also where a + (b − a) would not be b."""
    generator = torch.Generator().manual_seed(0)
    chunked = (-torch.rand(4000, generator=generator) * 20).requires_grad_()
    values = -torch.rand(4000, generator=generator) * 1e-3
    rounded = chunked + (values - chunked).detach()
    assert not torch.equal(rounded, values)
    found = with_values(chunked, values)
    assert torch.equal(found, values)
    weights = torch.randn(4000, generator=generator)
    (found.exp() * weights).sum().backward()
    assert chunked.grad is not None
    torch.testing.assert_close(chunked.grad, values.exp() * weights)


@pytest.mark.sampled
@pytest.mark.parametrize("unbiased", [False, True], ids=["k3", "unbiased"])
@pytest.mark.parametrize("loss_type", ["dapo", "gspo", "cispo"])
@pytest.mark.parametrize("limit", [210, 1024], ids=["accumulated", "packed"])
def test_gradients_with_the_engines_values(tmp_path: Path, loss_type: str, limit: int, unbiased: bool) -> None:
    torch.set_num_threads(1)
    directory = write_checkpoint(tmp_path, qwen_like_tokenizer(), **SCALE)
    host = TrainingHost(directory, max_train_tokens=1024)
    adapter = random_adapter(host)
    model = peft_reference(directory, adapter, tmp_path / "adapter")
    groups, beta = rollouts(), 0.3
    generator = torch.Generator().manual_seed(4)
    says: dict[Key, Tensor] = {}
    plain: list[Tensor] = []
    engines: list[Tensor] = []
    for group in groups:
        for completion in group["completions"]:
            prompt, ids = group["prompt_token_ids"], completion["token_ids"]
            key = tuple(prompt + ids)
            logprobs = reference_logprobs(model, prompt + ids, len(prompt), completion["temperature"])
            with torch.no_grad(), model.disable_adapter():
                base = reference_logprobs(model, prompt + ids, len(prompt), completion["temperature"])

            # Engines that are far from the forward, so that a value of the wrong one shows.
            def moved(values: Tensor, by: float) -> Tensor:
                return values.detach() + by * torch.randn(len(values), generator=generator)

            says[True, key] = moved(logprobs, 0.2)
            says[False, key] = moved(base, 0.2)
            completion["logprobs"] = moved(says[True, key], 0.3).clamp(max=0.0).tolist()
            rewards = [one["reward"] for one in group["completions"]]
            if statistics.stdev(rewards) == 0:
                continue
            advantage = (completion["reward"] - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-4)
            values = says[True, key] + (logprobs - logprobs.detach())
            log_ratio = values - torch.tensor(completion["logprobs"])
            ratio = log_ratio.exp()
            if loss_type == "gspo":
                sequence = log_ratio.mean().exp()
                bounded = sequence.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
                loss = -torch.minimum(sequence * advantage, bounded * advantage).expand(len(ids))
            elif loss_type == "cispo":
                loss = -ratio.detach().clamp(max=1.2) * advantage * values
            else:
                loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantage)
            difference = says[False, key] - values
            kl = difference.exp() - difference - 1
            loss = loss + beta * (ratio * kl if unbiased else kl)
            plain.append(loss)
            engines.append(says[True, key] - logprobs.detach())
    learnt = [len(part) for part in plain]
    weights = [1 / (len(plain) * length) if loss_type == "gspo" else 1 / sum(learnt) for length in learnt]
    total = torch.stack([weight * part.sum() for weight, part in zip(weights, plain, strict=True)]).sum()
    total.backward()

    bounds = {"cispo_max_ratio": 1.2} if loss_type == "cispo" else {"clip_low": CLIP_LOW, "clip_high": CLIP_HIGH}
    spec = {"adapter": "a", "groups": groups, "loss_type": loss_type, "beta": beta, "unbiased_kl": unbiased, **bounds}
    spec |= {"max_tokens_per_microbatch": limit, "exact_forward": True}
    host.rollouts = Scripted(host, says)  # type: ignore[attr-defined]
    run = GrpoRun.prepare(GrpoJob.model_validate(spec), host, adapter)  # type: ignore[arg-type]
    run._before(0, lambda: None)
    metrics, _ = run._accumulate(0, lambda: None)
    assert host.rollouts.asked == [(True, 7), (False, 7)]  # type: ignore[attr-defined]
    assert metrics["loss"] == pytest.approx(float(total.detach()), rel=1e-4, abs=1e-6)
    gap = torch.cat(engines).abs()
    assert metrics["forward_gap_mean"] == pytest.approx(float(gap.mean()), rel=1e-3)
    assert metrics["forward_gap_max"] == pytest.approx(float(gap.max()), rel=1e-3)
    assert_same_gradients(gradients(run.lora), model)
    # The ordinary mode is another objective on such an engine: the above was not empty.
    ordinary = GrpoRun.prepare(GrpoJob.model_validate(spec | {"exact_forward": False}), host, adapter)  # type: ignore[arg-type]
    assert abs(ordinary._accumulate(0, lambda: None)[0]["loss"] - metrics["loss"]) > 1e-3
