"""The GPU's differentiable forward and its backward against plain autograd: hidden states and every LoRA gradient."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.gpu.train.head import token_scores
from services.engine.models.interface import Probe, Recompute
from services.engine.models.lora.binding import bind_adapter
from services.engine.models.lora.lora_batch import LoraBatch
from services.engine.models.lora.trainable import LoraParams
from services.engine.models.qwen3_5.model import Qwen3_5
from services.engine.models.qwen3_5.training import plain, trunk
from services.engine.models.training_arena import GraphMemory
from services.engine.models.training_forward import FrozenForward, TrainableForward
from tests.kernels.gpu import interpreter  # noqa: F401
from tests.parity.adapters import adapter_files, make_adapter
from tests.parity.conftest import Pair
from tests.parity.reference import CONFIGS, prompt
from tests.parity.test_gradients import assert_equal_gradients, gradients

FEW = (6, 2, 3)
MANY = (70, 2, 65) if torch.cuda.is_available() else (66, 2)
"""Tokens of documents. A tile has 64; Triton's interpreter takes a second a token."""


def packed(sizes: Sequence[int]) -> tuple[Tensor, list[int], Tensor]:
    """Token ids, lengths, and rows whose next token is known."""
    documents = [prompt(size) for size in sizes]
    lengths = [len(document) for document in documents]
    tokens = torch.tensor([token for document in documents for token in document])
    ends = set((torch.cumsum(torch.tensor(lengths), 0) - 1).tolist())
    return tokens, lengths, torch.tensor([row for row in range(len(tokens)) if row not in ends])


def loss_of(logprobs: Tensor) -> Tensor:
    """Something that weighs tokens differently."""
    weights = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(2)).to(logprobs.device)
    return -(logprobs * weights).sum() / len(logprobs)


def fused(
    model: Qwen3_5,
    lora: LoraParams | None,
    recompute: Recompute,
    device: torch.device,
    sizes: Sequence[int] = FEW,
) -> tuple[Tensor, Tensor]:
    """Hidden states and log-probabilities."""
    tokens, lengths, rows = packed(sizes)
    hidden = trunk.forward_packed(
        tokens.to(device),
        lengths,
        model.config,
        model.weights,
        model.rotation,
        lora,
        recompute=recompute,
        give_way=lambda: None,
    )
    targets = tokens[rows + 1].to(device)
    return hidden, token_scores(hidden[rows.to(device)], model.weights.head.dense(), targets, 0.9).logprobs


def device_and_model(pair: Pair) -> tuple[torch.device, Qwen3_5]:
    if not torch.cuda.is_available():
        return torch.device("cpu"), pair.model
    return torch.device("cuda"), Qwen3_5.from_directory(pair.path, dtype="float32", device="cuda")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CONFIGS)
def test_equals_plain_autograd(pairs: dict[str, Pair], name: str, tmp_path: Path) -> None:
    pair = pairs[name]
    sizes = MANY if name in ("grouped", "odd-groups") or torch.cuda.is_available() else FEW
    make_adapter(pair.path, tmp_path, r=3)
    bound = bind_adapter(adapter_files(tmp_path), pair.model.config, max_rank=8)
    tokens, lengths, rows = packed(sizes)
    lora = LoraParams.from_bound(bound)
    exact = plain.forward_packed(
        tokens,
        lengths,
        pair.model.config,
        pair.model.weights,
        pair.model.rotation,
        lora,
        recompute="none",
        give_way=lambda: None,
    )
    loss_of(pair.model.token_logprobs(exact[rows], tokens[rows + 1], 0.9)).backward()
    expected = gradients(lora)
    device, model = device_and_model(pair)
    ours = LoraParams.from_bound(bound, device=device)
    hidden, logprobs = fused(model, ours, "none", device, sizes)
    assert float((hidden.detach().cpu() - exact.detach()).abs().max()) <= 2e-4
    loss_of(logprobs).backward()
    assert_equal_gradients({key: value.cpu() for key, value in gradients(ours).items()}, expected)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["grouped", "experts"])
def test_recomputation_changes_no_bit(pairs: dict[str, Pair], name: str, tmp_path: Path) -> None:
    pair = pairs[name]
    make_adapter(pair.path, tmp_path, r=3)
    device, model = device_and_model(pair)
    lora = LoraParams.from_bound(bind_adapter(adapter_files(tmp_path), model.config, max_rank=8), device=device)
    found = []
    levels: tuple[Recompute, ...] = ("none", "selective", "full")
    for recompute in levels:
        loss_of(fused(model, lora, recompute, device)[1]).backward()
        found.append({name: value.clone() for name, value in gradients(lora).items()})
    for other in found[1:]:
        for name, value in found[0].items():
            assert value.any()
            assert torch.equal(value, other[name]), name


@pytest.mark.sampled(1)
@pytest.mark.parametrize("levels", [["none"], ["none", "selective", "full"]], ids=str)
def test_documents_that_go_on_from_others(pairs: dict[str, Pair], levels: list[Recompute], tmp_path: Path) -> None:
    """Behind up to three others, several behind one; whatever is computed again."""
    pair = pairs["grouped"]
    make_adapter(pair.path, tmp_path, r=3)
    bound = bind_adapter(adapter_files(tmp_path), pair.model.config, max_rank=8)
    begin = 70 if torch.cuda.is_available() else 6
    lengths, parents = [begin, 2, 1, 3, 2, 2, 4], [None, None, 0, 0, 1, 2, 5]
    device, model = device_and_model(pair)
    tokens = torch.tensor(prompt(sum(lengths)))
    weights = torch.randn(sum(lengths), model.config.hidden_size, generator=torch.Generator().manual_seed(3))
    lora = LoraParams.from_bound(bound)
    give_way: Any = {"give_way": lambda: None, "parents": parents}
    exact = pair.model.forward_train(tokens, lengths, lora, recompute="none", **give_way)
    (exact * weights).sum().backward()
    expected = gradients(lora)
    found = []
    for recompute in levels:
        ours = LoraParams.from_bound(bound, device=device)
        settings = (model.config, model.weights, model.rotation, ours)
        hidden = trunk.forward_packed(tokens.to(device), lengths, *settings, recompute=recompute, **give_way)
        assert float((hidden.detach().cpu() - exact.detach()).abs().max()) <= 2e-4
        (hidden * weights.to(device)).sum().backward()
        found.append({key: value.cpu() for key, value in gradients(ours).items()})
    assert_equal_gradients(found[0], expected)
    for other in found[1:]:
        for key, value in found[0].items():
            assert torch.equal(value, other[key]), key


def test_documents_of_several_adapters_go_on_from_none(pairs: dict[str, Pair], tmp_path: Path) -> None:
    pair = pairs["grouped"]
    make_adapter(pair.path, tmp_path, r=3)
    device, model = device_and_model(pair)
    bound = bind_adapter(adapter_files(tmp_path), model.config, max_rank=8)
    lora = LoraBatch((LoraParams.from_bound(bound, device=device), LoraParams.from_bound(bound, device=device)), (1, 1))
    settings = (model.config, model.weights, model.rotation, lora)
    tokens = torch.tensor(prompt(3), device=device)
    with pytest.raises(ValueError, match="several adapters"):
        trunk.forward_packed(tokens, [2, 1], *settings, recompute="none", give_way=lambda: None, parents=[None, 0])


class Seen(Probe):
    """What a forward shows; without column 1 of what goes into the second layer's projections."""

    def __init__(self) -> None:
        self.inputs: dict[str, Tensor] = {}
        self.streams: dict[int, tuple[Tensor, Tensor]] = {}

    def output(self, path: str, inputs: Tensor) -> Tensor:
        """See Probe."""
        self.inputs[path] = inputs.cpu().clone()
        if path.startswith("layers.1."):
            inputs = inputs.clone()
            inputs[:, 1] = 0
        return inputs

    def layer(self, index: int, before: Tensor, after: Tensor) -> None:
        """See Probe."""
        self.streams[index] = before.cpu().clone(), after.cpu().clone()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["grouped", "experts"])
def test_a_probe_sees_and_changes_what_it_does_in_plain_torch(pairs: dict[str, Pair], name: str) -> None:
    tokens, lengths, _ = packed(FEW)
    device, model = device_and_model(pairs[name])
    plain_probe, probe = Seen(), Seen()
    ways: list[str] = []
    with torch.no_grad():
        expected = pairs[name].model.forward_probed(tokens, lengths, plain_probe)
    hidden = trunk.forward_probed(
        tokens.to(device), lengths, model.config, model.weights, model.rotation, probe, lambda: ways.append("")
    )
    assert not hidden.requires_grad
    assert float((hidden.cpu() - expected).abs().max()) <= 2e-4
    assert probe.inputs.keys() == plain_probe.inputs.keys()
    assert len(probe.inputs) == 2 * model.config.num_layers
    for path, inputs in plain_probe.inputs.items():
        assert float((probe.inputs[path] - inputs).abs().max()) <= 2e-4, path
    for index, streams in plain_probe.streams.items():
        for ours, theirs in zip(probe.streams[index], streams, strict=True):
            assert float((ours - theirs).abs().max()) <= 2e-4, index
    assert len(ways) == 2 * model.config.num_layers + 1, "others may compute between the halves of layers"


def test_without_gradients_nothing_is_kept(pairs: dict[str, Pair], tmp_path: Path) -> None:
    pair = pairs["grouped"]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = pair.model if device.type == "cpu" else Qwen3_5.from_directory(pair.path, dtype="float32", device=device)
    hidden, logprobs = fused(model, None, "none", device)
    assert not hidden.requires_grad
    assert not logprobs.requires_grad
    make_adapter(pair.path, tmp_path, r=3)
    lora = LoraParams.from_bound(bind_adapter(adapter_files(tmp_path), model.config, max_rank=8), device=device)
    with torch.no_grad():
        hidden, _ = fused(model, lora, "none", device)
    assert not hidden.requires_grad


@pytest.mark.thorough
def test_a_second_backward_is_refused(pairs: dict[str, Pair], tmp_path: Path) -> None:
    pair = pairs["grouped"]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = pair.model if device.type == "cpu" else Qwen3_5.from_directory(pair.path, dtype="float32", device=device)
    make_adapter(pair.path, tmp_path, r=3)
    lora = LoraParams.from_bound(bind_adapter(adapter_files(tmp_path), model.config, max_rank=8), device=device)
    hidden, _ = fused(model, lora, "none", device)
    hidden.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already"):
        hidden.sum().backward()


@pytest.mark.cuda
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_captured_steps_are_those_launched_one_by_one(
    pairs: dict[str, Pair], recompute: Recompute, tmp_path: Path
) -> None:
    """Also for fewer rows and other documents than were there at the capture, and after the masters have moved."""
    pair = pairs["grouped"]
    device = torch.device("cuda")
    model = Qwen3_5.from_directory(pair.path, dtype="float32", device=device)
    make_adapter(pair.path, tmp_path, r=3)
    bound = bind_adapter(adapter_files(tmp_path), model.config, max_rank=8)
    eager, captured = (LoraParams.from_bound(bound, device=device) for _ in range(2))
    captured.link_gradients()
    forward = TrainableForward(model, captured, recompute, GraphMemory.on_demand(device))
    for lengths in ([70, 2, 65], [100], [1, 1, 3], [128], [70, 2, 65]):
        tokens = torch.tensor(prompt(sum(lengths)), device=device)
        hidden = model.forward_train(tokens, lengths, eager, recompute=recompute, give_way=lambda: None)
        weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1)).to(device)
        (hidden * weights).sum().backward()
        ways = itertools.count()
        again = forward(tokens, lengths, partial(next, ways))
        (again * weights).sum().backward()
        backward = 2 if recompute == "none" else 3
        assert next(ways) == (2 + backward) * model.config.num_layers + 1
        assert float((again - hidden).detach().abs().max()) <= 1e-4
        theirs = {name: tensor.grad.clone() for name, tensor in eager.named_parameters() if tensor.grad is not None}
        ours = {name: tensor.grad.clone() for name, tensor in captured.named_parameters() if tensor.grad is not None}
        assert_equal_gradients(ours, theirs)
        with torch.no_grad():
            for lora in (eager, captured):
                for flat in (lora.flat_a, lora.flat_b):
                    assert flat.grad is not None
                    flat.sub_(flat.grad, alpha=1e-3 / float(flat.grad.norm()))
                    flat.grad.zero_()


@pytest.mark.cuda
@pytest.mark.parametrize("adapted", [False, True])
def test_captured_forwards_of_a_teacher_are_those_launched_one_by_one(
    pairs: dict[str, Pair], adapted: bool, tmp_path: Path
) -> None:
    """They keep nothing: an older one's result stays, whatever comes after it."""
    pair = pairs["grouped"]
    device = torch.device("cuda")
    model = Qwen3_5.from_directory(pair.path, dtype="float32", device=device)
    lora = None
    if adapted:
        make_adapter(pair.path, tmp_path, r=3)
        lora = LoraParams.from_bound(bind_adapter(adapter_files(tmp_path), model.config, max_rank=8), device=device)
    forward = FrozenForward(model, lora, GraphMemory.on_demand(device))
    found = []
    for lengths in ([70, 2, 65], [100], [1, 1, 3], [128], [70, 2, 65]):
        tokens = torch.tensor(prompt(sum(lengths)), device=device)
        ways = itertools.count()
        found.append(forward(tokens, lengths, partial(next, ways)))
        assert next(ways) == 2 * model.config.num_layers + 1
        with torch.no_grad():
            hidden = model.forward_train(tokens, lengths, lora, recompute="none", give_way=lambda: None)
        assert not found[-1].requires_grad
        assert float((found[-1] - hidden).abs().max()) <= 1e-4
    assert torch.equal(found[0], found[-1])


def test_a_teacher_is_not_differentiable(pairs: dict[str, Pair], tmp_path: Path) -> None:
    pair = pairs["grouped"]
    make_adapter(pair.path, tmp_path, r=3)
    lora = LoraParams.from_bound(bind_adapter(adapter_files(tmp_path), pair.model.config, max_rank=8))
    tokens, lengths = torch.tensor(prompt(50)), [30, 20]
    hidden = FrozenForward(pair.model, lora)(tokens, lengths, lambda: None)
    expected = pair.model.forward_train(tokens, lengths, lora, recompute="none", give_way=lambda: None)
    assert not hidden.requires_grad
    assert torch.equal(hidden, expected.detach())


@pytest.mark.cuda
def test_of_captured_steps_only_the_newest_goes_back(pairs: dict[str, Pair], tmp_path: Path) -> None:
    pair = pairs["grouped"]
    model = Qwen3_5.from_directory(pair.path, dtype="float32", device="cuda")
    make_adapter(pair.path, tmp_path, r=3)
    lora = LoraParams.from_bound(bind_adapter(adapter_files(tmp_path), model.config, max_rank=8), device="cuda")
    lora.link_gradients()
    forward = TrainableForward(model, lora, "none", GraphMemory.on_demand(torch.device("cuda")))
    # Also where the newer one has another shape: all chains keep what they keep in the same memory.
    for size in (50, 200):
        first = forward(torch.tensor(prompt(50), device="cuda"), [50], lambda: None)
        second = forward(torch.tensor(prompt(size), device="cuda"), [size], lambda: None)
        with pytest.raises(RuntimeError, match="another one came after it"):
            first.sum().backward()
        second.sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="already"):
            second.sum().backward()
