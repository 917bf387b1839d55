"""A new architecture is one module and one line in the registry: it loads, serves and trains an adapter, with the same
numbers as transformers and PEFT in float32."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM

from services.common.errors import CheckpointRejected
from services.common.jobs import LoraSettings
from services.engine.executors.cpu.runner import ModelRunner
from services.engine.models.checkpoint import checkpoint_digest
from services.engine.models.footprint import Formats, slot_bytes, weight_bytes
from services.engine.models.interface import CausalLM
from services.engine.models.lora.binding import bind_adapter
from services.engine.models.lora.slots import LoraSlots
from services.engine.models.lora.trainable import LoraParams
from services.engine.models.registry import ARCHITECTURES, Architecture, load_model, read_config
from services.engine.models.training_forward import TrainableForward
from services.engine.requests.request import BASE_PIN, AdapterPin, Request, SamplingParams
from services.engine.scheduler.config import SchedulerConfig
from services.engine.scheduler.scheduler import Scheduler
from services.trainer.memory.estimate import Workload, estimate

NAME = "Qwen3ForCausalLM"
PROMPTS = [tuple(range(5, 5 + count)) for count in (3, 37, 20, 64)]
NEW = 12
EOS = 1


@pytest.fixture
def reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Qwen3ForCausalLM:
    """transformers' model, whose checkpoint is in tmp_path, with the architecture registered."""
    module = "tests.unit.engine.models.dense"
    monkeypatch.setitem(ARCHITECTURES, NAME, Architecture(f"{module}:DenseConfig", f"{module}:Dense"))
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=120,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    model = Qwen3ForCausalLM(config).float()
    model.save_pretrained(tmp_path)
    return model


@pytest.fixture
def model(reference: Qwen3ForCausalLM, tmp_path: Path) -> CausalLM:
    return load_model(tmp_path, dtype="float32", device="cpu")


def serve(model: CausalLM, lora: LoraSlots, *, slot: int = 0) -> list[list[int]]:
    """Greedy answers, all requests at once, prompts in chunks of 16 tokens."""
    limits = SchedulerConfig(
        max_num_seqs=4,
        token_budget=16,
        block_size=8,
        num_blocks=64,
        num_slots=12,
        max_model_len=128,
        eos_token_ids=frozenset({EOS}),
    )
    cache = model.allocate_cache(limits.num_blocks, limits.block_size, limits.num_slots)
    runner = ModelRunner(model, cache, lora, num_slots=limits.num_slots, eos_token_ids=[EOS])
    scheduler = Scheduler(limits)
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    pin = AdapterPin(f"a@{slot}", str(slot), slot) if slot else BASE_PIN
    for number, prompt in enumerate(PROMPTS):
        scheduler.add(Request(str(number), prompt, sampling, pin))
    answers: dict[str, list[int]] = {}
    while scheduler.has_work:
        plan = scheduler.schedule(0.0)
        assert plan is not None
        for update in scheduler.update(plan, runner.execute(plan), 0.0):
            if update.token is not None:
                answers.setdefault(update.request_id, []).append(update.token.token_id)
        scheduler.check_integrity()
    return [answers[str(number)] for number in range(len(PROMPTS))]


@torch.no_grad()
def expected(reference: torch.nn.Module) -> list[list[int]]:
    generate = reference.generate
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return [generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in PROMPTS]


def test_it_loads(model: CausalLM, reference: Qwen3ForCausalLM, tmp_path: Path) -> None:
    config = read_config(tmp_path)
    assert config.parameters() == sum(parameter.numel() for parameter in reference.parameters())
    assert weight_bytes(config, Formats(4)) == model.nbytes()
    assert slot_bytes(config, Formats(4)) == 0
    assert len(checkpoint_digest(tmp_path)) == 64
    assert estimate(config, Workload(1000, 8, 64, 4, "none", fused=False)).total > 0


def test_it_serves_what_transformers_generates(model: CausalLM, reference: Qwen3ForCausalLM) -> None:
    assert serve(model, LoraSlots(model.config, 1, 4, model.dtype, model.device)) == expected(reference)


def test_a_step_trains_an_adapter_as_peft_does(model: CausalLM, reference: Qwen3ForCausalLM, tmp_path: Path) -> None:
    settings = LoraSettings(rank=4, alpha=8.0, seed=3)
    lora = LoraParams.create(model.config, settings)
    with torch.no_grad():
        for name, tensor in lora.named_parameters():
            if "lora_B" in name:
                tensor.normal_(std=0.1)
    modules = [path.rsplit(".", 1)[1] for path in model.config.linear_shapes(0)]
    peft = get_peft_model(reference, LoraConfig(r=4, lora_alpha=8.0, target_modules=modules))
    prefix = "base_model.model.model."
    theirs = {
        name.removeprefix(prefix).removesuffix(".default.weight"): parameter
        for name, parameter in peft.named_parameters()
        if parameter.requires_grad
    }
    ours = dict(lora.named_parameters())
    assert ours.keys() == theirs.keys()
    with torch.no_grad():
        for name, tensor in theirs.items():
            tensor.copy_(ours[name])
    optimizers = [torch.optim.SGD(list(each), lr=0.5) for each in (lora.parameters(), theirs.values())]
    forward = TrainableForward(model, lora, "none")
    lengths = [len(prompt) for prompt in PROMPTS]
    tokens = torch.tensor([token for prompt in PROMPTS for token in prompt])
    ends = set(torch.tensor(lengths).cumsum(0).tolist())
    rows = torch.tensor([row for row in range(len(tokens)) if row + 1 not in ends])
    for _ in range(3):
        loss = -model.token_logprobs(forward(tokens, lengths, lambda: None)[rows], tokens[rows + 1]).mean()
        parts = [
            torch.log_softmax(peft(torch.tensor([prompt])).logits[0, :-1], -1).gather(
                1, torch.tensor(prompt[1:])[:, None]
            )
            for prompt in PROMPTS
        ]
        their_loss = -torch.cat(parts).mean()
        torch.testing.assert_close(loss, their_loss, rtol=1e-5, atol=1e-5)
        for each, optimizer in zip((loss, their_loss), optimizers, strict=True):
            optimizer.zero_grad()
            each.backward()
            optimizer.step()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-5)
    # What was trained is served.
    slots = LoraSlots(model.config, 2, 4, model.dtype, model.device)
    slots.load(1, bind_adapter(lora.to_files("base"), model.config, max_rank=4))
    assert serve(model, slots, slot=1) == expected(peft)


@pytest.mark.parametrize("named", [["LlamaForCausalLM"], None])
def test_an_unknown_architecture_is_refused(tmp_path: Path, named: list[str] | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": named, "model_type": "llama"}))
    with pytest.raises(CheckpointRejected, match="model_type 'llama' is not supported, only Qwen3_5ForCausalLM"):
        read_config(tmp_path)
