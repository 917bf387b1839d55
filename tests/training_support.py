"""A random checkpoint of the family, and a pod's training side without the pod: for tests of the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from safetensors.torch import load, save
from transformers import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, Qwen3_5TextConfig

from services.common.jobs import LoraSettings
from services.engine.models.lora.binding import bind_adapter
from services.engine.models.lora.trainable import LoraParams
from services.engine.models.weights.drafter import drafter_files
from services.trainer.jobs.base import JobRun, RunState
from services.trainer.runtime.local_checkpoints import Checkpoint, decode, encode
from tests.training_host import CPU
from tests.training_host import CountingGate as CountingGate
from tests.training_host import TrainingHost as TrainingHost


def write_checkpoint(directory: Path, tokenizer_files: Mapping[str, bytes], *, seed: int = 0, **config: Any) -> Path:
    """A random model of a few thousand parameters a layer, saved by transformers, with the tokenizer beside it."""
    settings: dict[str, Any] = {
        "vocab_size": 416,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,
        **config,
    }
    torch.manual_seed(seed)
    if "num_experts" in settings:
        model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**settings))
    else:
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**settings))
    model.float().save_pretrained(directory)
    for name, data in tokenizer_files.items():
        (directory / name).write_bytes(data)
    return directory


def random_adapter(host: TrainingHost, *, rank: int = 4, seed: int = 1, scale: float = 0.05) -> dict[str, bytes]:
    """Files of an adapter whose B matrices are not zero, so that every gradient is alive."""
    settings = LoraSettings(rank=rank, alpha=2.0 * rank, seed=seed)
    files = dict(LoraParams.create(host.model.config, settings, device=CPU).to_files("base"))
    generator = torch.Generator().manual_seed(seed)
    tensors = load(files["adapter_model.safetensors"])
    for name, tensor in sorted(tensors.items()):
        if "lora_B" in name:
            tensors[name] = (torch.randn(tensor.shape, generator=generator) * scale).to(tensor.dtype)
    return files | {"adapter_model.safetensors": save(tensors)}


def random_drafter(host: TrainingHost, seed: int = 2) -> dict[str, bytes]:
    """Files of a drafter of random numbers."""
    generator = torch.Generator().manual_seed(seed)
    shapes = host.model.config.mtp_shapes()
    tensors = {
        name: torch.randn(shape, generator=generator) * (0.1 if len(shape) == 1 else shape[-1] ** -0.5)
        for name, shape in shapes.items()
    }
    return drafter_files(tensors, host.base_digest, {})


def gradients(lora: LoraParams) -> dict[str, torch.Tensor]:
    """The gradient of every adapter tensor, by its name in adapter_model.safetensors. Overwrites the parameters."""
    with torch.no_grad():
        for parameter in lora.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    return load(lora.to_files("base")["adapter_model.safetensors"])


def peft_reference(checkpoint: Path, files: Mapping[str, bytes], directory: Path) -> PeftModel:
    """The same adapter on transformers' own model, by PEFT, in float32 with every adapter tensor trainable."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (directory / name).write_bytes(data)
    base = Qwen3_5ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return PeftModel.from_pretrained(base, directory, is_trainable=True)


def reference_logprobs(model: PeftModel, tokens: list[int], start: int, temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of ``tokens[start:]``, from full logits of one sequence."""
    logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs[start - 1 : -1].gather(1, torch.tensor(tokens[start:]).unsqueeze(1)).squeeze(1)


def assert_same_gradients(found: Mapping[str, torch.Tensor], model: PeftModel, tolerance: float = 1e-4) -> float:
    """Every adapter tensor's gradient, relative to its norm. Returns the largest difference."""
    wanted = {
        name.replace(".default", ""): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    assert set(found) == set(wanted)
    differences = {}
    for name, gradient in wanted.items():
        assert gradient is not None
        assert float(gradient.norm()) > 0, f"{name} gets no gradient: the test would prove nothing"
        differences[name] = float((found[name] - gradient).norm() / gradient.norm())
    worst = max(differences, key=differences.__getitem__)
    assert differences[worst] <= tolerance, f"{worst}: {differences[worst]:.2e}, norm {wanted[worst].norm():.2e}"
    return differences[worst]


_CLOCKED = ("_seconds", "tokens_per_second", "overlap_share")


def without_times(metrics: Mapping[str, float]) -> dict[str, float]:
    """A step's metrics without those of the clock."""
    return {name: value for name, value in metrics.items() if not name.endswith(_CLOCKED)}


def through_a_checkpoint(state: RunState) -> RunState:
    """As it comes back from the store."""
    found = decode("sha", 1, encode("sha", Checkpoint(1, state)))
    assert found is not None
    return found.state


class Stepped(NamedTuple):
    """A job from beginning to end."""

    curve: list[dict[str, float]]
    """What each step said, without its times."""
    parameters: list[torch.Tensor]
    """Its adapter at the end."""
    saved: list[RunState]
    """What was saved behind each step."""


def stepped(run: JobRun) -> Stepped:
    """Takes all steps of a job."""
    curve, saved = [], []
    for index in range(run.total_steps):
        curve.append(without_times(run.step(index)))
        saved.append(through_a_checkpoint(run.state()))
    return Stepped(curve, [parameter.detach().clone() for parameter in run.lora.parameters()], saved)


def adapter_state(host: TrainingHost, files: Mapping[str, bytes]) -> dict[str, torch.Tensor]:
    """What a run's adapter has to be loaded with to be that of ``files``."""
    bound = bind_adapter(files, host.model.config, max_rank=host.max_lora_rank)
    return LoraParams.from_bound(bound, device=CPU).state()
