"""The arithmetic of merges against dense float64 implementations that share no code with it, and against PEFT's."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from services.adapter_tools.low_rank import Factors, concatenated, nearest, truncated
from services.adapter_tools.merge import Merged, Weighted, merge_layer
from services.common.jobs import MergeSettings


def merge_settings(count: int, **fields: Any) -> MergeSettings:
    weights = fields.pop("weights", [1.0] * count)
    sources = [{"adapter": f"parent-{index}", "weight": weight} for index, weight in enumerate(weights)]
    return MergeSettings.model_validate({"sources": sources, **fields})


def parents(*ranks: int, out: int = 20, width: int = 12, seed: int = 0, weights: Any = None) -> list[Weighted]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index, rank in enumerate(ranks):
        a = torch.randn(rank, width, generator=generator, dtype=torch.float64)
        b = torch.randn(out, rank, generator=generator, dtype=torch.float64)
        made.append(Weighted(Factors(a, b), 1.0 if weights is None else weights[index], index))
    return made


def product(merged: Merged) -> Tensor:
    return merged.b.double() @ merged.a.double()


def best(matrix: Tensor, rank: int) -> Tensor:
    """The nearest matrix of that rank, by LAPACK's SVD."""
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ vh[:rank]


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


# What a dense implementation of the papers gives, entry by entry.


def dense_trim(delta: Tensor, density: float) -> Tensor:
    kept = max(1, int(density * delta.numel()))
    order = sorted(range(delta.numel()), key=lambda i: -abs(float(delta.flatten()[i])))
    flat = torch.zeros(delta.numel(), dtype=torch.float64)
    for index in order[:kept]:
        flat[index] = delta.flatten()[index]
    return flat.view_as(delta)


def dense_elect(deltas: list[Tensor], weights: list[float]) -> Tensor:
    result = torch.zeros_like(deltas[0])
    for place in range(result.numel()):
        entries = [w * float(d.flatten()[place]) for w, d in zip(weights, deltas, strict=True)]
        mass = sum(entries)
        agreeing = [(abs(w), e) for w, e in zip(weights, entries, strict=True) if e * mass > 0]
        if agreeing:
            result.view(-1)[place] = sum(e for _, e in agreeing) / sum(w for w, _ in agreeing)
    return result


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [0.7, 0.3, -0.5]])
def test_a_weighted_merge_is_exact(weights: list[float]) -> None:
    given_parents = parents(2, 5, 3, weights=weights)
    merged = merge_layer("x", given_parents, merge_settings(3, weights=weights, scale=1.5), 0)
    exact = 1.5 * sum(p.weight * p.factors.dense() for p in given_parents)
    assert merged.a.shape == (10, 12)
    assert relative(product(merged), exact) < 1e-6
    assert merged.error < 1e-6


@pytest.mark.parametrize("method", ["weighted", "svd"])
def test_a_rank_cuts_off_what_svd_says(method: str) -> None:
    weights = [0.7, -0.3]
    given_parents = parents(4, 6, weights=weights)
    exact = sum(p.weight * p.factors.dense() for p in given_parents)
    merged = merge_layer("x", given_parents, merge_settings(2, weights=weights, method=method, rank=5), 0)
    assert merged.a.shape[0] == 5
    assert relative(product(merged), best(exact, 5)) < 1e-6
    assert merged.error == pytest.approx(relative(best(exact, 5), exact), rel=1e-5)
    assert merged.error > 0.05, "something is cut off here"


@hypothesis_settings(max_examples=40, deadline=None)
@given(
    out=st.integers(1, 24),
    width=st.integers(1, 24),
    ranks=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    rank=st.integers(1, 30),
    seed=st.integers(0, 2**16),
)
def test_truncation_of_any_shape(out: int, width: int, ranks: list[int], rank: int, seed: int) -> None:
    factors = concatenated([p.factors for p in parents(*ranks, out=out, width=width, seed=seed)])
    matrix = factors.dense()
    wanted = best(matrix, rank)
    floor = 1e-7 * float(matrix.norm())
    for found in (truncated(factors, rank), nearest(matrix, rank)):
        assert found.rank <= min(rank, out, width)
        missed = float((found.dense() - matrix).norm())
        assert missed <= float((wanted - matrix).norm()) * (1 + 1e-6) + floor
        assert math.isfinite(found.norm())
    assert factors.norm() == pytest.approx(float(matrix.norm()), rel=1e-9)


@pytest.mark.parametrize("spectrum", ["steep", "noise on signal", "flat", "low rank", "clustered"])
@pytest.mark.parametrize("shape", [(700, 500), (500, 700)])
def test_large_matrices_have_their_nearest_too(spectrum: str, shape: tuple[int, int]) -> None:
    """Where the eigenvectors come from an iteration: as near as LAPACK's SVD comes, whatever the spectrum is like."""
    generator = torch.Generator().manual_seed(1)

    def noise(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    left, right = torch.linalg.qr(noise(shape[0], 400)).Q, torch.linalg.qr(noise(shape[1], 400)).Q
    index = torch.arange(400, dtype=torch.float64)
    sigma = {
        "steep": 10 ** (-index / 8),
        "noise on signal": 5.0 * (index < 12),
        "flat": torch.ones(400, dtype=torch.float64),
        "low rank": 1.0 * (index < 5),
        "clustered": torch.where(index < 20, 1.0, 0.999 - index / 4000),
    }[spectrum]
    matrix = (left * sigma) @ right.T
    if spectrum == "noise on signal":
        matrix += 0.02 * noise(*shape)
    found = nearest(matrix, 16)
    smallest = float((matrix - best(matrix, 16)).norm())
    assert found.rank == 16
    assert float((matrix - found.dense()).norm()) <= smallest * (1 + 1e-6) + 1e-7 * float(matrix.norm())
    assert torch.equal(found.a, nearest(matrix, 16).a), "the same every time"


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [0.7, 0.3, -0.5]])
@pytest.mark.parametrize("density", [0.2, 0.6, 1.0])
def test_ties_is_the_papers(weights: list[float], density: float) -> None:
    given_parents = parents(2, 4, 3, out=9, width=7, weights=weights)
    exact = 0.8 * dense_elect([dense_trim(p.factors.dense(), density) for p in given_parents], weights)
    options = {"weights": weights, "method": "ties", "density": density, "scale": 0.8}
    full = merge_layer("x", given_parents, merge_settings(3, **options, rank=7), 0)
    assert relative(product(full), exact) < 1e-6
    assert full.error < 1e-6
    cut = merge_layer("x", given_parents, merge_settings(3, **options, rank=3), 0)
    assert relative(product(cut), best(exact, 3)) < 1e-5
    assert cut.error == pytest.approx(relative(best(exact, 3), exact), rel=1e-5)


def test_weights_of_ties_count_relative_to_each_other() -> None:
    given_parents = parents(3, 3)
    one, two = (
        merge_layer(
            "x",
            [Weighted(p.factors, w, p.index) for p, w in zip(given_parents, ws, strict=True)],
            merge_settings(2, weights=ws, method="ties", density=0.5, rank=12),
            0,
        )
        for ws in ([0.7, 0.3], [7.0, 3.0])
    )
    assert relative(product(two), product(one)) < 1e-6


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
def test_dare_drops_and_rescales(method: str) -> None:
    """Of a constant delta, what was kept can be read off the result."""
    out = width = 40
    one = torch.full((out, width), 3.0, dtype=torch.float64)
    factors = Factors(torch.ones(1, width, dtype=torch.float64), torch.full((out, 1), 3.0, dtype=torch.float64))
    settings = merge_settings(1, method=method, density=0.25, rank=width)
    merged = product(merge_layer("layers.0.mlp.up_proj", [Weighted(factors, 1.0, 0)], settings, 7))
    rounded = merged.round(decimals=3)
    assert set(rounded.abs().unique().tolist()) == {0.0, 12.0}
    share = float((rounded != 0).double().mean())
    assert share == pytest.approx(0.25, abs=4 * math.sqrt(0.25 * 0.75 / one.numel()))


def test_dare_depends_on_seed_layer_and_parent_and_on_nothing_else() -> None:
    given_parents = parents(2, 2)
    settings = merge_settings(2, method="dare_linear", density=0.5, rank=8)

    def run(path: str = "layers.0.q", seed: int = 1) -> Tensor:
        return product(merge_layer(path, given_parents, settings, seed))

    first = run()
    torch.manual_seed(123)
    assert torch.equal(run(), first)
    assert not torch.allclose(run(seed=2), first)
    assert not torch.allclose(run(path="layers.1.q"), first)


def test_dare_ties_elects_among_what_was_kept() -> None:
    """The draws are those that the module's documentation promises: they are part of what a seed means."""
    weights = [1.0, 0.5, -0.25]
    given_parents = parents(2, 3, 2, out=8, width=6, weights=weights)
    kept = []
    for parent in given_parents:
        digest = hashlib.sha256(f"11:layers.2.x:{parent.index}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        mask = torch.rand(8, 6, generator=generator, dtype=torch.float64) < 0.6
        kept.append(parent.factors.dense() * mask / 0.6)
    settings = merge_settings(3, weights=weights, method="dare_ties", density=0.6, rank=6)
    merged = product(merge_layer("layers.2.x", given_parents, settings, 11))
    assert relative(merged, dense_elect(kept, weights)) < 1e-6


def test_dares_mean_over_seeds_is_the_weighted_sum() -> None:
    given_parents = parents(2, 3, out=6, width=5, weights=[0.5, -1.0])
    settings = merge_settings(2, weights=[0.5, -1.0], method="dare_linear", density=0.5, rank=5)
    exact = sum(p.weight * p.factors.dense() for p in given_parents)
    draws = torch.stack([product(merge_layer("x", given_parents, settings, seed)) for seed in range(3000)])
    error = (draws.mean(0) - exact).abs()
    assert bool((error <= 5 * draws.std(0) / math.sqrt(len(draws)) + 1e-6).all())


@pytest.mark.parametrize(
    ("combination", "fields"),
    [
        ("cat", {"method": "weighted", "weights": [0.7, 0.3]}),
        ("svd", {"method": "svd", "rank": 3, "weights": [0.7, -0.3]}),
        ("ties_svd", {"method": "ties", "density": 0.4, "rank": 4}),
        # Random entries differ by nature; at density 1 nothing is drawn and the rest of the method is compared.
        ("dare_linear_svd", {"method": "dare_linear", "density": 1.0, "rank": 4, "weights": [0.6, 0.9]}),
        ("dare_ties_svd", {"method": "dare_ties", "density": 1.0, "rank": 4}),
    ],
)
@pytest.mark.filterwarnings("ignore:The density")
def test_peft_agrees_where_it_means_the_same(combination: str, fields: dict[str, Any]) -> None:
    torch.manual_seed(3)
    model = get_peft_model(
        nn.Sequential(nn.Linear(14, 11, bias=False)), LoraConfig(r=3, lora_alpha=6, target_modules=["0"])
    )
    model.add_adapter("second", LoraConfig(r=5, lora_alpha=5, target_modules=["0"]))
    layer: Any = model.base_model.model[0]
    given_parents = []
    weights = fields.get("weights", [1.0, 1.0])
    for index, name in enumerate(("default", "second")):
        with torch.no_grad():
            layer.lora_B[name].weight.normal_()
        factors = Factors(
            layer.lora_A[name].weight.detach().double(),
            layer.lora_B[name].weight.detach().double() * layer.scaling[name],
        )
        given_parents.append(Weighted(factors, weights[index], index))
    options = {"svd_rank": fields.get("rank"), "density": fields.get("density")}
    model.base_model.add_weighted_adapter(
        ["default", "second"], weights, "merged", combination_type=combination, **options
    )
    theirs = layer.get_delta_weight("merged").detach().double()
    ours = product(merge_layer("x", given_parents, merge_settings(2, **fields), 0))
    assert relative(ours, theirs) < 1e-5


def test_a_delta_of_zero_is_merged_to_zero() -> None:
    zero = Weighted(Factors(torch.randn(2, 6).double(), torch.zeros(5, 2).double()), 1.0, 0)
    for fields in ({}, {"method": "svd", "rank": 2}, {"method": "ties", "rank": 2, "density": 0.5}):
        merged = merge_layer("x", [zero], merge_settings(1, **fields), 0)
        assert float(product(merged).abs().max()) == 0
        assert merged.error == 0
        assert bool(torch.isfinite(merged.a).all())
