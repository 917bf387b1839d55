"""Every LoRA gradient of a GRPO step equals a plain transformers + PEFT backward of the formula."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.jobs import GrpoJob
from services.trainer.jobs.grpo_run import GrpoRun
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

# float32 itself is good for 1e-5 at this scale of weights; three times larger ones cost it another digit.
SCALE = {"initializer_range": 0.1}
SHAPES: dict[str, dict[str, Any]] = {
    "default": {},
    "one kv head, untied": {"num_key_value_heads": 1, "tie_word_embeddings": False},
}
CLIP_LOW, CLIP_HIGH = 0.1, 0.15


def rollouts() -> list[dict[str, Any]]:
    """Two groups with spread and one without; completions of 1 to 130 tokens, at two temperatures."""
    generator = torch.Generator().manual_seed(3)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, 400, (count,), generator=generator).tolist()

    groups = []
    for prompt, lengths, rewards in (
        (5, (1, 63, 64, 20), (0.0, 1.0, 0.5, 0.0)),
        (70, (130, 7, 2), (1.0, 0.25, 0.0)),
        (9, (4, 4), (1.0, 1.0)),
    ):
        completions = [
            {"token_ids": tokens(length), "reward": reward, "temperature": 0.8 if length % 2 else 1.0}
            for length, reward in zip(lengths, rewards, strict=True)
        ]
        groups.append({"prompt_token_ids": tokens(prompt), "completions": completions})
    return groups


@pytest.mark.sampled
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("limit", [210, 1024], ids=["accumulated", "packed"])
def test_grpo_gradients(tmp_path: Path, shape: dict[str, Any], beta: float, checkpointing: bool, limit: int) -> None:
    torch.set_num_threads(1)
    directory = write_checkpoint(tmp_path, qwen_like_tokenizer(), **SCALE, **shape)
    host = TrainingHost(directory, max_train_tokens=1024)
    adapter = random_adapter(host)
    model = peft_reference(directory, adapter, tmp_path / "adapter")
    groups = rollouts()

    # A behaviour policy near the present one, far enough that both bounds clip some tokens.
    generator = torch.Generator().manual_seed(4)
    losses, ratios = [], []
    for group in groups:
        rewards = [completion["reward"] for completion in group["completions"]]
        for completion in group["completions"]:
            prompt, ids = group["prompt_token_ids"], completion["token_ids"]
            logprobs = reference_logprobs(model, prompt + ids, len(prompt), completion["temperature"])
            noise = 0.3 * torch.randn(len(ids), generator=generator)
            completion["logprobs"] = (logprobs.detach() + noise).tolist()
            if statistics.stdev(rewards) == 0:
                continue
            advantage = (completion["reward"] - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-4)
            ratio = (logprobs - torch.tensor(completion["logprobs"])).exp()
            bounded = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
            loss = -torch.minimum(ratio * advantage, bounded * advantage)
            if beta:
                with torch.no_grad(), model.disable_adapter():
                    base = reference_logprobs(model, prompt + ids, len(prompt), completion["temperature"])
                loss = loss + beta * ((base - logprobs).exp() - (base - logprobs) - 1)
            losses.append(loss)
            ratios.append(ratio.detach())
    total = torch.cat(losses).mean()
    total.backward()

    spec = GrpoJob.model_validate(
        {
            "adapter": "a",
            "groups": groups,
            "clip_low": CLIP_LOW,
            "clip_high": CLIP_HIGH,
            "beta": beta,
            "gradient_checkpointing": checkpointing,
            "max_tokens_per_microbatch": limit,
        }
    )
    run = GrpoRun.prepare(spec, host, adapter)
    metrics, _ = run._accumulate(0, lambda: None)
    assert metrics["loss"] == pytest.approx(float(total.detach()), rel=1e-4, abs=1e-6)
    assert metrics["ratio_mean"] == pytest.approx(float(torch.cat(ratios).mean()), rel=1e-4)
    assert metrics["clip_fraction_low"] > 0
    assert metrics["clip_fraction_high"] > 0
    assert metrics["groups_skipped"] == 1
    assert_same_gradients(gradients(run.lora), model)
