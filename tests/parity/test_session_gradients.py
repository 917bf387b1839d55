"""What a session computes equals plain transformers + PEFT in float32: log-probabilities, the gradients of each loss
accumulated over two calls, and AdamW."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor

from services.common.jobs import LoraSettings
from services.common.jobs.training_sessions.calls import Forward, ForwardBackward, LossConfig, OptimStep
from services.common.jobs.training_sessions.data import Datum
from services.trainer.jobs.adapter_run import starting_adapter
from services.trainer.training_sessions.policy import SessionPolicy, Shape
from tests.tokenizer_support import qwen_like_tokenizer
from tests.training_support import (
    TrainingHost,
    assert_same_gradients,
    gradients,
    peft_reference,
    random_adapter,
    write_checkpoint,
)

# float32 itself is good for 1e-5 at this scale of weights; three times larger ones cost it another digit.
SCALE = {"initializer_range": 0.1}
LOSSES: dict[str, tuple[str, LossConfig]] = {
    "cross_entropy": ("cross_entropy", LossConfig()),
    "importance_sampling": ("importance_sampling", LossConfig()),
    "ppo": ("ppo", LossConfig(clip_low=0.1, clip_high=0.15)),
    "ppo, defaults": ("ppo", LossConfig()),
    "cispo": ("cispo", LossConfig(cap=1.05)),
    "cispo, defaults": ("cispo", LossConfig()),
}


def reference_loss(name: str, config: LossConfig, logp: Tensor, datum: Datum, *, temperature: float) -> Tensor:
    """The formula on one sequence, written out once more."""
    weights = torch.tensor(datum.effective_weights)
    if name == "cross_entropy":
        return -(weights * logp).sum()
    advantage, behaviour = torch.tensor(datum.aligned("advantages")), torch.tensor(datum.aligned("logprobs"))
    ratio = torch.exp(logp - behaviour)
    if name == "importance_sampling":
        return -(weights * ratio * advantage).sum()
    if name == "ppo":
        low = 1 - (0.2 if config.clip_low is None else config.clip_low)
        high = 1 + (0.2 if config.clip_high is None else config.clip_high)
        return -(weights * torch.minimum(ratio * advantage, torch.clamp(ratio, low, high) * advantage)).sum()
    cap = 5.0 if config.cap is None else config.cap
    return -(weights * torch.clamp(ratio, max=cap).detach() * advantage * logp).sum()


def reference_logprobs(model: PeftModel, datum: Datum, temperature: float) -> Tensor:
    """Log-probability of every predicted token."""
    logits = model(input_ids=torch.tensor([datum.inputs]), use_cache=False).logits[0].float()
    chosen = torch.tensor(datum.predicted).unsqueeze(1)
    return (logits / temperature).log_softmax(-1).gather(1, chosen).squeeze(1)


def sequences(policy_model: PeftModel, loss: str, *, with_targets: bool, temperature: float, seed: int) -> list[Datum]:
    """Data of 2 to 90 tokens with weights of either sign, some 0; behaviour near the policy on both sides of it."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for length in (2, 17, 90, 33):
        tokens = torch.randint(0, 400, (length,), generator=generator).tolist()
        targets = torch.randint(0, 400, (length,), generator=generator).tolist() if with_targets else None
        weights = torch.randn(length, generator=generator)
        weights[torch.rand(length, generator=generator) < 0.3] = 0.0
        weights[-1] = 0.5
        if not with_targets:
            weights[0] = 0.0
        fields: dict[str, Any] = {"token_ids": tokens, "targets": targets, "weights": weights.tolist()}
        if loss != "cross_entropy":
            with torch.no_grad():
                now = reference_logprobs(policy_model, Datum(**fields), temperature)
            if not with_targets:
                now = torch.cat([torch.zeros(1), now])
            noise = 0.3 * torch.randn(length, generator=generator)
            fields["logprobs"] = (now + noise).clamp(max=0).tolist()
            fields["advantages"] = torch.randn(length, generator=generator).tolist()
        found.append(Datum(**fields))
    return found


def prepared(tmp_path: Path, **config: Any) -> tuple[TrainingHost, dict[str, bytes], PeftModel]:
    torch.set_num_threads(1)
    checkpoint = write_checkpoint(tmp_path / "model", qwen_like_tokenizer(), **{**SCALE, **config})
    host = TrainingHost(checkpoint)
    files = random_adapter(host)
    return host, files, peft_reference(checkpoint, files, tmp_path / "adapter")


def policy_of(host: TrainingHost, files: dict[str, bytes], *, tokens: int = 64, recompute: Any = "none") -> Any:
    return SessionPolicy(host, starting_adapter(LoraSettings(), host, files), Shape(tokens, recompute))


def score(policy: SessionPolicy, call: Forward | ForwardBackward) -> dict[str, Any]:
    """The whole call, part by part."""
    scoring = policy.begin(call)
    result = None
    while result is None:
        result = scoring.next_part()
    return result


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainingHost, dict[str, bytes], PeftModel]:
    """Result of prepared(), made once; nothing changes it but gradients."""
    return prepared(tmp_path_factory.mktemp("usual"))


@pytest.mark.sampled
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("with_targets", [False, True], ids=["next tokens", "targets"])
@pytest.mark.parametrize(("loss", "config"), LOSSES.values(), ids=LOSSES.keys())
def test_gradients_accumulated_over_two_calls(
    usual: tuple[TrainingHost, dict[str, bytes], PeftModel],
    loss: Any,
    config: LossConfig,
    with_targets: bool,
    recompute: Any,
) -> None:
    host, files, model = usual
    gave_way = host.gate.gave_way
    temperature = 0.8 if with_targets else 1.0
    policy = policy_of(host, files, recompute=recompute)
    model.zero_grad()
    for seq in (1, 2):
        data = sequences(model, loss, with_targets=with_targets, temperature=temperature, seed=seq)
        call = ForwardBackward(seq=seq, loss=loss, data=data, loss_config=config, temperature=temperature)
        result = score(policy, call)
        wanted = 0.0
        for datum, found in zip(data, result["logprobs"], strict=True):
            logp = reference_logprobs(model, datum, temperature)
            part = reference_loss(loss, config, logp, datum, temperature=temperature)
            part.backward()
            wanted += float(part.detach())
            aligned = found[0 if with_targets else 1 :]
            assert len(found) == len(datum.token_ids)
            for value, weight, reference in zip(aligned, datum.effective_weights, logp.tolist(), strict=True):
                assert value is None if weight == 0 else value == pytest.approx(reference, abs=2e-5)
        assert result["loss"] == pytest.approx(wanted, rel=1e-4, abs=1e-4)
    worst = assert_same_gradients(gradients(policy.lora), model)
    assert worst > 0
    assert host.gate.gave_way > gave_way


def test_forward_leaves_gradients_alone(tmp_path: Path) -> None:
    host, files, model = prepared(tmp_path)
    data = sequences(model, "cross_entropy", with_targets=False, temperature=1.0, seed=1)
    once, twice = policy_of(host, files), policy_of(host, files)
    backward = ForwardBackward(seq=1, loss="cross_entropy", data=data)
    first = score(once, backward)
    score(twice, backward)
    again = score(twice, Forward(seq=2, data=data))
    assert again == first
    for left, right in zip(once.lora.parameters(), twice.lora.parameters(), strict=True):
        assert left.grad is not None
        assert right.grad is not None
        assert torch.equal(left.grad, right.grad)


def test_how_a_call_is_packed_changes_nothing(tmp_path: Path) -> None:
    host, files, model = prepared(tmp_path)
    data = sequences(model, "ppo", with_targets=False, temperature=1.0, seed=1)
    found = []
    for tokens in (16, 64, 1024):
        policy = policy_of(host, files, tokens=tokens)
        score(policy, ForwardBackward(seq=1, loss="ppo", data=data))
        found.append(gradients(policy.lora))
    for other in found[1:]:
        for name, gradient in found[0].items():
            assert float((other[name] - gradient).norm() / gradient.norm()) < 1e-4, name


STEPS: dict[str, dict[str, Any]] = {
    "plain": {"learning_rate": 1e-2},
    "all settings": {
        "learning_rate": 3e-3,
        "beta1": 0.8,
        "beta2": 0.95,
        "eps": 1e-6,
        "weight_decay": 0.1,
        "max_grad_norm": 0.05,
    },
}


@pytest.mark.parametrize("settings", STEPS.values(), ids=STEPS.keys())
def test_optim_step_is_torchs_adamw(tmp_path: Path, settings: dict[str, Any]) -> None:
    host, files, model = prepared(tmp_path)
    policy = policy_of(host, files)
    copies = [parameter.detach().clone().requires_grad_() for parameter in policy.lora.parameters()]
    adamw = torch.optim.AdamW(
        copies,
        lr=settings["learning_rate"],
        betas=(settings.get("beta1", 0.9), settings.get("beta2", 0.999)),
        eps=settings.get("eps", 1e-8),
        weight_decay=settings.get("weight_decay", 0.0),
    )
    for round_ in range(3):
        data = sequences(model, "cross_entropy", with_targets=False, temperature=1.0, seed=round_)
        score(policy, ForwardBackward(seq=1, loss="cross_entropy", data=data))
        for copy, parameter in zip(copies, policy.lora.parameters(), strict=True):
            assert parameter.grad is not None
            copy.grad = parameter.grad.clone()
        norm = torch.linalg.vector_norm(torch.stack([c.grad.norm() for c in copies if c.grad is not None]))
        if "max_grad_norm" in settings:
            assert float(norm) > settings["max_grad_norm"], "nothing would be clipped"
            torch.nn.utils.clip_grad_norm_(copies, settings["max_grad_norm"])
        adamw.step()
        result = policy.step(OptimStep(seq=2, **settings))
        assert result["step"] == round_ + 1
        assert result["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
        for copy, parameter in zip(copies, policy.lora.parameters(), strict=True):
            assert torch.allclose(parameter, copy, rtol=1e-6, atol=1e-8)
            assert parameter.grad is not None
            assert not parameter.grad.any(), "and is forgotten"
