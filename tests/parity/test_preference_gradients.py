"""Loss and LoRA gradients of DPO and KTO steps equal transformers + PEFT under the papers' formulas, in float32, also
where the two completions of a pair are in different microbatches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from services.common.jobs import DpoJob, KtoJob
from services.trainer.jobs.dpo import DpoRun, _apart
from services.trainer.jobs.kto import KtoRun
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

PAIRS = [
    {"prompt": "What is 2 + 2?", "chosen": "4", "rejected": "The answer is 46. " * 6},
    {"messages": [{"role": "user", "content": "Say it again. " * 5}], "chosen": "again " * 9, "rejected": "no"},
    {"prompt": "Reverse the string 'temper'.", "chosen": "repmet", "rejected": "temper"},
]
RATED = [
    {"prompt": "What is 2 + 2?", "completion": "4", "label": True},
    {"prompt": "x", "completion": "You are a helpful assistant. " * 8, "label": False},
    {"prompt": "Say it again. " * 5, "completion": "The answer is 46. " * 3, "label": True},
    {"prompt": "Reverse the string 'temper'.", "completion": "", "label": False},
    {"messages": [{"role": "user", "content": "Hello"}], "completion": "Hi", "label": True},
]


class Setting:
    def __init__(self, directory: Path) -> None:
        torch.set_num_threads(1)
        self.directory = directory
        # float32 itself is good for 1e-5 at this scale of weights; three times larger ones cost it another digit.
        self.checkpoint = write_checkpoint(directory / "model", qwen_like_tokenizer(), initializer_range=0.1)
        self.host = TrainingHost(self.checkpoint, max_train_tokens=1024)
        self.tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(self.checkpoint / "tokenizer.json"),
            chat_template=(self.checkpoint / "chat_template.jinja").read_text(),
        )

    def adapter(self, seed: int) -> tuple[dict[str, bytes], PeftModel]:
        files = random_adapter(self.host, seed=seed)
        return files, peft_reference(self.checkpoint, files, self.directory / f"adapter-{seed}")

    def prompt(self, example: dict[str, Any]) -> list[int]:
        messages = example.get("messages") or [{"role": "user", "content": example["prompt"]}]
        return list(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    def completion(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text + "<|im_end|>", add_special_tokens=False))


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return Setting(tmp_path_factory.mktemp("preference"))


def logp(model: PeftModel, prompt: list[int], completion: list[int]) -> Tensor:
    return reference_logprobs(model, prompt + completion, len(prompt)).sum()


@pytest.mark.sampled
@pytest.mark.parametrize("limit", [60, 190, 2048], ids=["pairs apart", "accumulated", "packed"])
@pytest.mark.parametrize("reference", ["base", "start"])
@pytest.mark.parametrize("smoothing", [0.0, 0.15])
def test_dpo(setting: Setting, reference: str, smoothing: float, limit: int) -> None:
    before, starting = setting.adapter(1)
    after, policy = setting.adapter(2)
    beta = 0.3
    spec = DpoJob.model_validate(
        {
            "adapter": "a",
            "examples": PAIRS,
            "batch_size": 3,
            "epochs": 2,
            "beta": beta,
            "label_smoothing": smoothing,
            "reference": reference,
            "max_tokens_per_microbatch": limit,
        }
    )
    run = DpoRun.prepare(spec, setting.host, before)
    apart = _apart(run._pack_together(run.chosen(0)), run.chosen(0))
    assert bool(apart) == (limit == 60)
    run._accumulate(0, lambda: None)
    run._optimizer.zero_grad()
    run.lora.load_state(adapter_state(setting.host, after))
    metrics, _ = run._accumulate(1, lambda: None)

    losses, margins, rewards = [], [], []
    for pair in PAIRS:
        prompt, ratios = setting.prompt(pair), []
        for side in ("chosen", "rejected"):
            completion = setting.completion(pair[side])
            with torch.no_grad():
                if reference == "start":
                    held = logp(starting, prompt, completion)
                else:
                    with policy.disable_adapter():
                        held = logp(policy, prompt, completion)
            ratios.append(logp(policy, prompt, completion) - held)
        margin = beta * (ratios[0] - ratios[1])
        losses.append(
            -(1 - smoothing) * torch.log(torch.sigmoid(margin)) - smoothing * torch.log(torch.sigmoid(-margin))
        )
        margins.append(float(margin.detach()))
        rewards.append(beta * float(ratios[0].detach()))
    loss = torch.stack(losses).mean()
    policy.zero_grad(set_to_none=True)
    loss.backward()
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert metrics["margin"] == pytest.approx(sum(margins) / 3, rel=1e-3, abs=1e-4)
    assert metrics["accuracy"] == pytest.approx(sum(margin > 0 for margin in margins) / 3)
    assert metrics["rewards_chosen"] == pytest.approx(sum(rewards) / 3, rel=1e-3, abs=1e-4)
    assert_same_gradients(gradients(run.lora), policy)


@pytest.mark.sampled
@pytest.mark.parametrize("limit", [60, 190, 2048], ids=["one by one", "accumulated", "packed"])
@pytest.mark.parametrize(("seed", "away"), [(10, True), (3, False)], ids=["reference point", "reference point at 0"])
def test_kto(setting: Setting, seed: int, away: bool, limit: int) -> None:
    before, policy = setting.adapter(seed)
    beta, desirable, undesirable = 0.4, 1.3, 0.6
    spec = KtoJob.model_validate(
        {
            "adapter": "a",
            "examples": RATED,
            "batch_size": 4,  # the fifth example joins the only step
            "epochs": 1,
            "shuffle": False,
            "beta": beta,
            "desirable_weight": desirable,
            "undesirable_weight": undesirable,
            "max_tokens_per_microbatch": limit,
        }
    )
    run = KtoRun.prepare(spec, setting.host, before)
    assert run.total_steps == 1
    metrics, _ = run._accumulate(0, lambda: None)

    prompts = [setting.prompt(example) for example in RATED]
    completions = [setting.completion(example["completion"]) for example in RATED]

    def ratio(prompt: list[int], completion: list[int]) -> Tensor:
        with torch.no_grad(), policy.disable_adapter():
            held = logp(policy, prompt, completion)
        return logp(policy, prompt, completion) - held

    with torch.no_grad():
        wrong = [ratio(prompts[(i + 1) % 5], completion) for i, completion in enumerate(completions)]
        mean = torch.stack(wrong).mean()
        assert (float(mean) > 0) == away, float(mean)
        z0 = torch.clamp(mean, min=0)
    losses = []
    for example, prompt, completion in zip(RATED, prompts, completions, strict=True):
        found = ratio(prompt, completion)
        if example["label"]:
            losses.append(desirable * (1 - torch.sigmoid(beta * (found - z0))))
        else:
            losses.append(undesirable * (1 - torch.sigmoid(beta * (z0 - found))))
    loss = torch.stack(losses).mean()
    policy.zero_grad(set_to_none=True)
    loss.backward()
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert metrics["kl"] == pytest.approx(float(z0), rel=1e-3, abs=1e-5)
    assert_same_gradients(gradients(run.lora), policy)
