"""Several adapters in one forward: to each it is as if it were alone, in plain torch and in the GPU's kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.common.jobs import LoraSettings
from services.engine.models.interface import Recompute
from services.engine.models.lora.lora_batch import LoraBatch
from services.engine.models.lora.trainable import LoraParams
from services.engine.models.qwen3_5.model import Qwen3_5
from services.engine.models.qwen3_5.training import plain, trunk
from tests.kernels.gpu import interpreter  # noqa: F401
from tests.parity.conftest import Pair
from tests.parity.fused_models import in_float64
from tests.parity.reference import prompt
from tests.parity.test_gradients import assert_equal_gradients, gradients

LENGTHS = [[6, 2], [3], [66, 4]]
"""Documents of each adapter. A tile has 64 rows."""
INTERPRETED = LENGTHS if torch.cuda.is_available() else [[2, 1], [3], [1, 2]]
"""The same for kernels: Triton's interpreter takes its time. Tiles of several slots are in the kernels' own tests."""


def adapters(model: Qwen3_5, count: int = len(LENGTHS), **settings: object) -> list[LoraParams]:
    """Adapters whose B is not zero."""
    made = []
    for seed in range(count):
        lora = LoraParams.create(
            model.config, LoraSettings.model_validate({"rank": 3, "seed": seed} | settings), device=model.device
        )
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            lora.flat_b.copy_(0.1 * torch.randn(lora.flat_b.shape, generator=generator))
        made.append(lora)
    return made


def hidden_states(
    model: Qwen3_5,
    tokens: Tensor,
    lengths: list[int],
    lora: LoraParams | LoraBatch,
    recompute: Recompute,
    *,
    kernels: bool,
) -> Tensor:
    forward = trunk.forward_packed if kernels else plain.forward_packed
    return forward(
        tokens.to(model.device),
        lengths,
        model.config,
        model.weights,
        model.rotation,
        lora,
        recompute=recompute,
        give_way=lambda: None,
    )


_SEED = 13
"""With it an ulp more or less in each result moves no gradient by more than 3e-5 (see conditioning.py). With 0 one of
in_proj_a, of which little is left behind sums of much larger numbers, moves by 1e-4."""


def weighted(hidden: Tensor, seed: int) -> Tensor:
    """A sum in which every number counts differently."""
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(_SEED + seed))
    return (hidden * weights.to(hidden.device)).sum()


def documents(*, kernels: bool) -> list[list[int]]:
    return INTERPRETED if kernels else LENGTHS


def tokens_of(job: int, lengths: list[int]) -> Tensor:
    return torch.tensor([token for length in lengths for token in prompt(length + job)[job:]])


def together(
    model: Qwen3_5, loras: list[LoraParams], recompute: Recompute, *, kernels: bool
) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Hidden states and gradients of each adapter, of one forward and one backward."""
    everything = documents(kernels=kernels)
    batch = LoraBatch(tuple(loras), tuple(map(len, everything)))
    tokens = torch.cat([tokens_of(job, lengths) for job, lengths in enumerate(everything)])
    packed = [length for lengths in everything for length in lengths]
    hidden = hidden_states(model, tokens, packed, batch, recompute, kernels=kernels)
    parts = torch.split(hidden, [sum(lengths) for lengths in everything])
    torch.stack([weighted(part, job) for job, part in enumerate(parts)]).sum().backward()
    return [part.detach().cpu() for part in parts], [
        {name: value.cpu() for name, value in gradients(lora).items()} for lora in loras
    ]


def alone(model: Qwen3_5, lora: LoraParams, job: int, *, kernels: bool) -> tuple[Tensor, dict[str, Tensor]]:
    lengths = documents(kernels=kernels)[job]
    hidden = hidden_states(model, tokens_of(job, lengths), lengths, lora, "none", kernels=kernels)
    weighted(hidden, job).backward()
    return hidden.detach().cpu(), {name: value.cpu() for name, value in gradients(lora).items()}


def in_double(path: Path, job: int, **settings: object) -> tuple[Tensor, dict[str, Tensor]]:
    """Hidden states and gradients of one adapter alone, by plain torch in float64."""
    model = Qwen3_5.from_directory(path, dtype=torch.float64, device="cpu")
    given = adapters(model, **settings)[job]
    with in_float64():
        lora = adapters(model, **settings)[job]
        with torch.no_grad():
            lora.flat_a.copy_(given.flat_a)
            lora.flat_b.copy_(given.flat_b)
        lengths = documents(kernels=True)[job]
        hidden = hidden_states(model, tokens_of(job, lengths), lengths, lora, "none", kernels=False)
        weighted(hidden, job).backward()
        return hidden.detach(), gradients(lora)


@pytest.mark.sampled
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", ["grouped", "experts"])
def test_each_adapter_learns_as_if_alone(pairs: dict[str, Pair], name: str, recompute: Recompute) -> None:
    model = pairs[name].model
    loras = adapters(model)
    states, found = together(model, loras, recompute, kernels=False)
    for job, lora in enumerate(adapters(model)):
        hidden, expected = alone(model, lora, job, kernels=False)
        assert float((states[job] - hidden).abs().max()) <= 5e-5
        assert_equal_gradients(found[job], expected)


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "settings"),
    [("grouped", {}), ("odd-groups", {"target_modules": ["q_proj", "in_proj_z", "out_proj", "up_proj"]})],
)
def test_kernels_for_many_adapters_are_those_for_one(
    pairs: dict[str, Pair], name: str, settings: dict[str, object]
) -> None:
    model = pairs[name].model
    if torch.cuda.is_available():
        model = Qwen3_5.from_directory(pairs[name].path, dtype="float32", device="cuda")
    states, found = together(model, adapters(model, **settings), "none", kernels=True)
    for job, lora in enumerate(adapters(model, **settings)):
        hidden, single = alone(model, lora, job, kernels=True)
        # Both by float64: two results in float32 may each be off by what rounding alone moves them (conditioning.py).
        exact, expected = in_double(pairs[name].path, job, **settings)
        for state, each in ((states[job], found[job]), (hidden, single)):
            assert float((state - exact).abs().max()) <= 2e-4
            assert_equal_gradients({path: value.double() for path, value in each.items()}, expected)


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kernels", [False, True], ids=["plain", "kernels"])
def test_an_adapter_that_is_not_finite_hurts_no_other(pairs: dict[str, Pair], kernels: bool) -> None:
    model = pairs["grouped"].model
    if kernels and torch.cuda.is_available():
        model = Qwen3_5.from_directory(pairs["grouped"].path, dtype="float32", device="cuda")
    loras = adapters(model)
    with torch.no_grad():
        loras[1].flat_b.fill_(float("nan"))
    states, found = together(model, loras, "none", kernels=kernels)
    assert [bool(state.isfinite().all()) for state in states] == [True, False, True]
    assert [all(bool(value.isfinite().all()) for value in each.values()) for each in found] == [True, False, True]


def test_adapters_of_other_shapes_are_refused(pairs: dict[str, Pair], tmp_path: Path) -> None:
    model = pairs["grouped"].model
    (one,), (other,) = adapters(model, 1), adapters(model, 1, rank=4)
    for loras, counts, what in (
        ((one, other), (1, 1), "different ranks"),
        ((one, one), (1, 1), "twice"),
        ((one,), (0,), "documents"),
        ((), (), "0 adapters"),
    ):
        with pytest.raises(ValueError, match=what):
            LoraBatch(loras, counts)
    with pytest.raises(ValueError, match="2 documents, of which 1"):
        model.forward_train(
            torch.tensor([1, 2]), [1, 1], LoraBatch((one,), (1,)), recompute="none", give_way=lambda: None
        )
