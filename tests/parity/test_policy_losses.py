"""Loss and LoRA gradients of every GRPO loss type, correction, KL form and reward scale equal transformers + PEFT under
the same formulas, written here from the papers, in float32: off policy, however the step is cut into microbatches."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor

from services.common.jobs import GrpoJob
from services.trainer.jobs.grpo_run import GrpoRun
from tests.tokenizer_support import qwen_like_tokenizer
from tests.training_support import (
    TrainingHost,
    adapter_state,
    assert_same_gradients,
    gradients,
    peft_reference,
    random_adapter,
    reference_logprobs,
    write_checkpoint,
)

CASES: dict[str, dict[str, Any]] = {
    "dapo": {"loss_type": "dapo"},
    "grpo": {"loss_type": "grpo", "beta": 0.2},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": False, "max_completion_length": 200},
    "dr_grpo by the longest": {"loss_type": "dr_grpo", "scale_rewards": "none", "mask_truncated": True},
    "bnpo": {"loss_type": "bnpo", "scale_rewards": "batch"},
    "cispo": {"loss_type": "cispo", "cispo_max_ratio": 1.1},
    "gspo": {"loss_type": "gspo", "clip_low": 0.01, "clip_high": 0.005},
    "gspo, sequences truncated": {
        "loss_type": "gspo", "clip_low": 0.01, "clip_high": 0.005, "beta": 0.1, "unbiased_kl": True,
        "mismatch_correction": "sequence_truncate", "mismatch_cap": 1.4,
    },
    "tokens truncated": {"mismatch_correction": "token_truncate", "mismatch_cap": 1.2, "beta": 0.3},
    "tokens masked": {"loss_type": "grpo", "mismatch_correction": "token_mask", "mismatch_cap": 1.2},
    "sequences masked": {"mismatch_correction": "sequence_mask", "mismatch_cap": 2.0, "loss_type": "bnpo"},
    "unbiased kl, truncated ones masked": {
        "loss_type": "grpo", "beta": 0.3, "unbiased_kl": True, "mask_truncated": True, "scale_rewards": True,
    },
}  # fmt: skip


def sampled_groups() -> list[dict[str, Any]]:
    """Two groups with spread and one without; completions of 1 to 130 tokens, some of them truncated."""
    generator = torch.Generator().manual_seed(3)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, 400, (count,), generator=generator).tolist()

    return [
        {
            "prompt_token_ids": tokens(prompt),
            "completions": [
                {"token_ids": tokens(length), "reward": reward, "truncated": length == 64}
                for length, reward in zip(lengths, rewards, strict=True)
            ],
        }
        for prompt, lengths, rewards in (
            (5, (1, 63, 64, 20), (0.0, 1.0, 0.5, 0.0)),
            (70, (130, 7, 2), (1.0, 0.25, 0.0)),
            (9, (4, 4), (1.0, 1.0)),
        )
    ]


class Setting:
    """A checkpoint, the adapter a job starts from, another one it has come to, and rollouts with behaviour."""

    def __init__(self, directory: Path) -> None:
        torch.set_num_threads(1)
        # float32 itself is good for 1e-5 at this scale of weights; three times larger ones cost it another digit.
        self.checkpoint = write_checkpoint(directory / "model", qwen_like_tokenizer(), initializer_range=0.1)
        self.host = TrainingHost(self.checkpoint, max_train_tokens=1024)
        self.before, self.after = random_adapter(self.host, seed=1), random_adapter(self.host, seed=2)
        self.groups = sampled_groups()
        starting = peft_reference(self.checkpoint, self.before, directory / "before")
        self.policy = peft_reference(self.checkpoint, self.after, directory / "after")
        generator = torch.Generator().manual_seed(4)
        self.start: list[Tensor] = []
        self.base: list[Tensor] = []
        with torch.no_grad():
            for group, completion in self.completions():
                prompt, ids = group["prompt_token_ids"], completion["token_ids"]
                self.start.append(reference_logprobs(starting, prompt + ids, len(prompt)))
                with self.policy.disable_adapter():
                    self.base.append(reference_logprobs(self.policy, prompt + ids, len(prompt)))
                # Per token up to some tenths off, and a completion as a whole by about one.
                away = 0.15 * torch.randn(len(ids), generator=generator) + torch.randn(1, generator=generator) / len(
                    ids
                )
                completion["logprobs"] = (self.start[-1] + away).clamp(max=0.0).tolist()

    def completions(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        return [(group, completion) for group in self.groups for completion in group["completions"]]


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return Setting(tmp_path_factory.mktemp("policy"))


def expected_loss(setting: Setting, policy: PeftModel, case: Mapping[str, Any]) -> tuple[Tensor, dict[str, float]]:
    """The loss of one step over all groups, and some of its metrics; from the formulas of the papers."""
    kind = case.get("loss_type", "dapo")
    low, high = case.get("clip_low", 0.2), case.get("clip_high", 0.28)
    correction = case.get("mismatch_correction", "none")
    rewards = [completion["reward"] for _, completion in setting.completions()]
    losses: list[list[tuple[Tensor, int]]] = []  # of each group: (sum over the tokens, tokens) of each completion
    weights, count_high, tokens, at = [], 0, 0, -1
    completions_in_step = 0
    for group in setting.groups:
        own = [completion["reward"] for completion in group["completions"]]
        spread = statistics.stdev(own)
        losses.append([])
        for completion in group["completions"]:
            at += 1
            if spread == 0:
                continue
            completions_in_step += 1
            if case.get("mask_truncated") and completion["truncated"]:
                continue
            advantage = completion["reward"] - statistics.mean(own)
            match case.get("scale_rewards", True):
                case True | "group":
                    advantage /= spread + 1e-4
                case "batch":
                    advantage /= statistics.stdev(rewards) + 1e-4
            prompt, ids = group["prompt_token_ids"], completion["token_ids"]
            logp = reference_logprobs(policy, prompt + ids, len(prompt))
            behaviour, start = torch.tensor(completion["logprobs"]), setting.start[at]
            old = behaviour if correction == "none" else start
            ratio = torch.exp(logp - old)
            if kind == "cispo":
                loss = -torch.minimum(ratio.detach(), torch.tensor(case["cispo_max_ratio"])) * advantage * logp
                count_high += int((ratio > case["cispo_max_ratio"]).sum())
            else:
                used = torch.exp((logp - old).mean()).expand(len(ids)) if kind == "gspo" else ratio
                bounded = torch.clip(used, 1 - low, 1 + high)
                loss = -torch.minimum(used * advantage, bounded * advantage)
                count_high += int((used > 1 + high).sum()) if advantage > 0 else 0
            if correction != "none":
                away = start - behaviour
                weight = torch.exp(away if correction.startswith("token") else away.sum().expand(len(ids)))
                over = weight > case["mismatch_cap"]
                if correction.endswith("mask"):
                    weight = torch.where(over, torch.zeros(()), weight)
                else:
                    weight = torch.where(over, torch.tensor(case["mismatch_cap"]), weight)
                loss = loss * weight
                weights.append(weight)
            if case.get("beta"):
                away = setting.base[at] - logp
                k3 = torch.exp(away) - away - 1
                loss = loss + case["beta"] * (ratio * k3 if case.get("unbiased_kl") else k3)
            losses[-1].append((loss.sum(), len(ids)))
            tokens += len(ids)
    groups = [group for group in losses if group]
    if kind in ("dapo", "cispo"):
        total = sum(loss for group in groups for loss, _ in group) / tokens
    elif kind in ("grpo", "gspo"):
        total = sum(loss / length for group in groups for loss, length in group) / completions_in_step
    elif kind == "dr_grpo":
        longest = case.get("max_completion_length", 130)
        total = sum(loss for group in groups for loss, _ in group) / (completions_in_step * longest)
    else:
        means = [sum(loss for loss, _ in group) / sum(length for _, length in group) for group in groups]
        total = sum(means) / len(means)
    found = {"tokens": float(tokens), "clip_fraction_high": count_high / tokens}
    if weights:
        every = torch.cat(weights)
        found |= {
            "mismatch_weight_mean": float(every.mean()),
            "mismatch_weight_min": float(every.min()),
            "mismatch_weight_max": float(every.max()),
        }
    assert isinstance(total, Tensor)
    return total, found


@pytest.mark.sampled
@pytest.mark.parametrize("limit", [200, 300, 1024], ids=["one by one", "accumulated", "packed"])
@pytest.mark.parametrize("name", CASES)
def test_policy_losses(setting: Setting, name: str, limit: int) -> None:
    case = CASES[name]
    spec = GrpoJob.model_validate(
        {"adapter": "a", "groups": setting.groups, "epochs": 2, "max_tokens_per_microbatch": limit, **case}
    )
    run = GrpoRun.prepare(spec, setting.host, setting.before)
    assert run.total_steps == 2
    run._accumulate(0, lambda: None)  # scores the starting policy
    run._optimizer.zero_grad()
    run.lora.load_state(adapter_state(setting.host, setting.after))
    metrics, _ = run._accumulate(1, lambda: None)

    setting.policy.zero_grad(set_to_none=True)
    loss, found = expected_loss(setting, setting.policy, case)
    loss.backward()
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-4, abs=1e-6)
    for key, value in found.items():
        assert metrics[key] == pytest.approx(value, rel=1e-3, abs=1e-6), key
    assert metrics["clip_fraction_high"] > 0
    assert metrics["clip_fraction_low"] > 0 or case.get("loss_type") == "cispo"
    if "mismatch_correction" in case:
        assert 0 < metrics["mismatch_fraction_outside"] < 1
    assert_same_gradients(gradients(run.lora), setting.policy)
