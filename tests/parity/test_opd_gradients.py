"""Loss and LoRA gradients of distillation steps equal transformers + PEFT under GKD's formula, in float32: with each
kind of teacher, on completions that the engine sampled, however the step is cut into microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import Qwen3_5ForCausalLM

from services.common.adapters.names import AdapterVersion
from services.common.jobs import OpdJob
from services.trainer.jobs.opd import OpdRun
from tests.kernels.divergence_support import generalized_jsd
from tests.rollout_support import Pod, running_pod
from tests.tokenizer_support import qwen_like_tokenizer
from tests.training_support import (
    TrainingHost,
    adapter_state,
    assert_same_gradients,
    gradients,
    peft_reference,
    random_adapter,
    write_checkpoint,
)

PROMPTS: list[dict[str, Any]] = [
    {"prompt_token_ids": [5, 9, 200, 31], "completion": "4"},
    {"prompt": "What is 2 + 2?", "completion": "The answer is 46. " * 3},
    {"prompt_token_ids": [77] * 30, "completion_token_ids": [4, 8, 300]},
    {"messages": [{"role": "user", "content": "Reverse 'temper'."}], "completion": "repmet"},
]


class Setting:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # float32 itself is good for 1e-5 at this scale of weights; three times larger ones cost it another digit.
        self.checkpoint = write_checkpoint(directory / "model", qwen_like_tokenizer(), initializer_range=0.1)
        # Another hidden size, other heads, another depth, a vocabulary padded further.
        self.teacher = write_checkpoint(
            directory / "teacher",
            qwen_like_tokenizer(),
            seed=5,
            initializer_range=0.1,
            hidden_size=48,
            num_attention_heads=2,
            num_key_value_heads=1,
            linear_num_value_heads=2,
            num_hidden_layers=2,
            layer_types=["linear_attention", "full_attention"],
            vocab_size=432,
        )
        self.host = TrainingHost(self.checkpoint)
        self.files = {seed: random_adapter(self.host, seed=seed) for seed in (1, 2, 3)}
        self.policy = peft_reference(self.checkpoint, self.files[2], directory / "policy")
        self.other = peft_reference(self.checkpoint, self.files[3], directory / "other")
        self.second = Qwen3_5ForCausalLM.from_pretrained(self.teacher, dtype=torch.float32)

    def teacher_logits(self, teacher: str, tokens: list[int]) -> Tensor:
        models: dict[str, Any] = {"base": self.policy, "other@1": self.other, "checkpoint": self.second}
        with torch.no_grad(), self.policy.disable_adapter() if teacher == "base" else nullcontext():
            return logits(models[teacher], tokens)


def logits(model: PeftModel | Qwen3_5ForCausalLM, tokens: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    torch.set_num_threads(1)
    return Setting(tmp_path_factory.mktemp("opd"))


@pytest.fixture(scope="module")
def pod(setting: Setting) -> Iterator[Pod]:
    with running_pod(model=setting.checkpoint, teacher_model=setting.teacher) as pod:
        pod.registry.versions[AdapterVersion("other", 1)] = setting.files[3]
        yield pod
        pod.settle()


def prepared(setting: Setting, pod: Pod, **fields: Any) -> OpdRun:
    """A run in whose only round the policy of adapter 1 has sampled, at the step of adapter 2."""
    job = {
        "adapter": "a",
        "prompts": PROMPTS,
        "rounds": 1,
        "epochs": 2,
        "max_tokens": 9,
        "lmbda": 0.6,
        "seed": 4,
        **fields,
    }
    run = OpdRun.prepare(OpdJob.model_validate(job), pod.host, setting.files[1])
    run._begin(0, lambda: None)
    run.lora.load_state(adapter_state(setting.host, setting.files[2]))
    return run


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("beta", "temperature"), [(0.0, 1.0), (0.1, 0.9), (0.5, 1.0), (0.5, 2.0), (0.9, 1.0), (1.0, 0.7)]
)
@pytest.mark.parametrize("teacher", ["base", "other@1", "checkpoint"])
@pytest.mark.parametrize("limit", [40, 2048], ids=["accumulated", "packed"])
def test_divergence(setting: Setting, pod: Pod, teacher: str, beta: float, temperature: float, limit: int) -> None:
    run = prepared(setting, pod, teacher=teacher, beta=beta, temperature=temperature, max_tokens_per_microbatch=limit)
    documents = run.batch(1)
    assert (len(run._pack(documents)) > 1) == (limit == 40)
    assert {sample.sampled for sample in run._round.given} == {True, False}
    metrics, _ = run._accumulate(1, lambda: None)

    total = sum(document.num_trained for document in documents)
    losses, reverse, agreed = [], 0.0, 0
    for document in documents:
        tokens = list(document.token_ids)
        start = document.length - document.num_trained
        student = logits(setting.policy, tokens)[start - 1 : -1]
        taught = setting.teacher_logits(teacher, tokens)[start - 1 : -1, : student.shape[1]]
        losses.append(generalized_jsd(student, taught, beta, temperature).sum())
        reverse += float(generalized_jsd(student, taught, 1.0, temperature).sum().detach())
        agreed += int((student.argmax(-1) == taught.argmax(-1)).sum())
    loss = torch.stack(losses).sum() / total
    setting.policy.zero_grad(set_to_none=True)
    loss.backward()
    assert metrics["tokens"] == total
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert metrics["divergence"] == metrics["loss"]
    assert metrics["kl_student_teacher"] == pytest.approx(reverse / total, rel=1e-4)
    assert metrics["teacher_agreement"] == pytest.approx(agreed / total)
    assert_same_gradients(gradients(run.lora), setting.policy)


@pytest.mark.sampled
@pytest.mark.parametrize("sampling", [1.0, 1.7])
@pytest.mark.parametrize("teacher", ["base", "checkpoint"])
@pytest.mark.parametrize("limit", [40, 2048], ids=["accumulated", "packed"])
def test_sampled_reverse_kl(setting: Setting, pod: Pod, teacher: str, sampling: float, limit: int) -> None:
    prompts = [{name: value for name, value in prompt.items() if "completion" not in name} for prompt in PROMPTS]
    run = prepared(
        setting,
        pod,
        teacher=teacher,
        loss="sampled_reverse_kl",
        prompts=prompts,
        lmbda=1,
        sampling_temperature=sampling,
        max_tokens_per_microbatch=limit,
    )
    documents = run.batch(1)
    metrics, _ = run._accumulate(1, lambda: None)

    total = sum(document.num_trained for document in documents)
    losses, estimate = [], 0.0
    for document in documents:
        tokens = list(document.token_ids)
        start = document.length - document.num_trained
        targets = torch.tensor(tokens[start:]).unsqueeze(1)
        student = (logits(setting.policy, tokens)[start - 1 : -1] / sampling).log_softmax(-1)
        taught = (setting.teacher_logits(teacher, tokens)[start - 1 : -1] / sampling).log_softmax(-1)
        behaviour = run._behaviour(document)
        advantage = -(behaviour - taught.gather(1, targets).squeeze(1))
        ratio = torch.exp(student.gather(1, targets).squeeze(1) - behaviour)
        losses.append(-(ratio * advantage).sum())
        estimate -= float(advantage.sum())
    loss = torch.stack(losses).sum() / total
    setting.policy.zero_grad(set_to_none=True)
    loss.backward()
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert metrics["kl_student_teacher"] == pytest.approx(estimate / total, rel=1e-4)
    assert_same_gradients(gradients(run.lora), setting.policy)


@pytest.mark.thorough
def test_the_sampled_estimate_has_the_gradient_of_the_divergence_on_average(setting: Setting, pod: Pod) -> None:
    """One token of one prompt, many samples: the mean policy gradient is the gradient of KL(student ‖ teacher)."""
    prompts = [{"prompt_token_ids": [5, 9, 200, 31]}] * 600
    fields: dict[str, Any] = {"teacher": "base", "prompts": prompts, "lmbda": 1, "max_tokens": 1, "epochs": 1}
    found = []
    for loss in ("sampled_reverse_kl", "divergence"):
        job = OpdJob.model_validate({"adapter": "a", "rounds": 1, "seed": 1, "loss": loss, **fields})
        run = OpdRun.prepare(job, pod.host, setting.files[2])
        run._begin(0, lambda: None)
        run._accumulate(0, lambda: None)
        found.append(torch.cat([gradient.flatten() for _, gradient in sorted(gradients(run.lora).items())]))
    estimated, exact = found
    assert float(torch.cosine_similarity(estimated, exact, dim=0)) > 0.8
