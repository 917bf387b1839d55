"""Merges of matrices that are worked on in pieces: as near as LAPACK comes, exact thresholds, the same draws, turns."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from services.adapter_tools import singular, sparse
from services.adapter_tools.low_rank import Factors, nearest
from services.adapter_tools.merge import Weighted, merge_layer, working_bytes
from services.adapter_tools.singular import DenseMatrix
from services.adapter_tools.sparse import kth_largest_by_bits, merged_entries, smallest_kept
from services.adapter_tools.workshop import ALONE, Workshop
from services.common.jobs import MergeSettings

METHODS = ["ties", "dare_linear", "dare_ties"]
WEIGHTS = [1.0, 0.6, -0.4]


def noise(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def parents(shape: tuple[int, int], *, count: int = 2, rank: int = 6, decay: float = 0.8) -> list[Weighted]:
    """Their singular values fall, as those of trained adapters do."""
    steps = decay ** torch.arange(rank, dtype=torch.float64)
    return [
        Weighted(
            Factors(noise(rank, shape[1], seed=2 * place), noise(shape[0], rank, seed=2 * place + 1) * steps),
            WEIGHTS[place],
            place,
        )
        for place in range(count)
    ]


def merge_settings(method: str, count: int = 2, **fields: Any) -> MergeSettings:
    sources = [{"adapter": f"parent-{place}", "weight": WEIGHTS[place]} for place in range(count)]
    options = {"density": 0.3, "rank": 16, **fields}
    return MergeSettings.model_validate({"sources": sources, "method": method, **options})


def exact_entries(given_parents: list[Weighted], settings: MergeSettings, path: str, seed: int) -> Tensor:
    """[out, in] float64: whole matrices at once, sorted thresholds, draws in one call."""
    density = settings.density or 1.0
    deltas = []
    for parent in given_parents:
        delta = parent.factors.b @ parent.factors.a
        if settings.method == "ties":
            kept = max(1, int(density * delta.numel()))
            delta = delta * (delta.abs() >= delta.abs().flatten().sort(descending=True).values[kept - 1])
        else:
            delta = delta * (drawn(path, seed, parent.index, delta.shape) < density) / density
        deltas.append(parent.weight * delta)
    total = sum(deltas, torch.zeros_like(deltas[0]))
    if settings.method == "dare_linear":
        return settings.scale * total
    agreeing = [delta * (delta * total > 0) for delta in deltas]
    mass = sum(
        (abs(p.weight) * (d != 0) for p, d in zip(given_parents, agreeing, strict=True)), torch.zeros_like(total)
    )
    return settings.scale * sum(agreeing, torch.zeros_like(total)) / mass.clamp_min(1e-300)


def drawn(path: str, seed: int, index: int, shape: torch.Size) -> Tensor:
    generator = sparse._Draws(seed, path, index, 0.5)._generator
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def smallest_distance(matrix: Tensor, rank: int) -> float:
    """What LAPACK's singular values leave."""
    return float(torch.linalg.svdvals(matrix.double())[rank:].norm())


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(900, 520), (520, 900)])
@pytest.mark.parametrize("spectrum", ["flat", "noise", "noise on signal", "steep", "clustered", "low rank"])
def test_the_iteration_comes_as_near_as_lapack(
    spectrum: str, shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right = torch.linalg.qr(noise(shape[0], 500, seed=1)).Q, torch.linalg.qr(noise(shape[1], 500, seed=2)).Q
    index = torch.arange(500, dtype=torch.float64)
    sigma = {
        "flat": torch.ones_like(index),
        "noise": 0 * index,
        "noise on signal": 5.0 * (index < 12),
        "steep": 10 ** (-index / 40),
        "clustered": torch.where(index < 20, 1.0, 0.999 - index / 4000),
        "low rank": 1.0 * (index < 5),
    }[spectrum]
    matrix = (left * sigma) @ right.T + (0.02 * noise(*shape, seed=3) if "noise" in spectrum else 0.0)
    matrix = matrix.to(dtype)
    all_eigenvectors = DenseMatrix.gram
    whole = []

    def gram(self: DenseMatrix) -> Tensor:
        whole.append(spectrum)
        return all_eigenvectors(self)

    monkeypatch.setattr(DenseMatrix, "gram", gram)
    found = nearest(matrix, 16)
    # So small a matrix has no room for the many columns that it takes to tell directions of noise apart.
    assert not whole or "noise" in spectrum or spectrum == "clustered"
    missed = float((matrix.double() - found.dense()).norm())
    floor = 1e-7 if dtype == torch.float64 else 1e-5
    assert missed <= smallest_distance(matrix, 16) * (1 + 1e-6) + floor * float(matrix.double().norm())
    again = nearest(matrix, 16)
    assert torch.equal(found.a, again.a)
    assert torch.equal(found.b, again.b)


def test_the_iteration_ends_on_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four directions in the noise that dropping half of all entries leaves: fourteen more are the noise's own."""
    shape = (1500, 1150)
    matrix = (noise(shape[0], 4, seed=1) @ noise(4, shape[1], seed=2) + 3 * noise(*shape, seed=3)).float()
    monkeypatch.delattr(DenseMatrix, "gram")
    missed = float((matrix.double() - nearest(matrix, 18).dense()).norm())
    assert missed <= smallest_distance(matrix, 18) * (1 + 1e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(900, 640), (560, 1300)])
def test_merges_are_as_near_as_their_rank_allows(method: str, shape: tuple[int, int]) -> None:
    """To what the papers say, computed in float64 with nothing in pieces."""
    settings = merge_settings(method)
    merged = merge_layer("layers.0.x", parents(shape), settings, 3)
    exact = exact_entries(parents(shape), settings, "layers.0.x", 3)
    missed = float((merged.b.double() @ merged.a.double() - exact).norm())
    assert missed <= smallest_distance(exact, 16) * (1 + 1e-5)
    assert merged.error == pytest.approx(missed / float(exact.norm()), rel=1e-5)
    assert merged.error > 0.3, "something is cut off here"


@pytest.mark.parametrize("numbers", [1, 5_000, 100_000, 10**7])
@pytest.mark.parametrize("method", METHODS)
def test_entries_do_not_depend_on_pieces(method: str, numbers: int) -> None:
    shape = (150, 210)
    settings = merge_settings(method, 3, scale=0.7)
    found = merged_entries("layers.1.x", parents(shape, count=3), settings, 5, Workshop(numbers=numbers))
    exact = exact_entries(parents(shape, count=3), settings, "layers.1.x", 5)
    assert found.dtype == torch.float32
    assert float((found.double() - exact).norm() / exact.norm()) < 1e-6
    assert torch.equal(found != 0, exact != 0)


def test_draws_of_pieces_are_those_of_the_whole() -> None:
    whole = drawn("layers.3.x", 9, 1, torch.Size((37, 53))) < 0.5
    draws = sparse._Draws(9, "layers.3.x", 1, 0.5)
    pieces = [draws.rows(rows, 53) for rows in Workshop(numbers=53 * 5).rows((37, 53))]
    assert len(pieces) == 8
    assert torch.equal(torch.cat([piece for piece in pieces if piece is not None]), whole)


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    values=st.lists(
        st.one_of(st.floats(0, 2.0**127, width=32), st.sampled_from([0.0, 1.0, 1e-45, 2.0**-126])),
        min_size=1,
        max_size=60,
    ),
    data=st.data(),
)
def test_bits_say_the_kth_largest(values: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(values)))
    found = kth_largest_by_bits(torch.tensor([values]), k, ALONE)
    assert float(found) == sorted(torch.tensor(values).tolist(), reverse=True)[k - 1]


def thin(shape: tuple[int, int], seed: int = 0) -> sparse._Thin:
    """Rows of very different sizes, so that a sample has something to be wrong about."""
    rows = 10 ** (2 * torch.rand(shape[0], 1, generator=torch.Generator().manual_seed(seed)))
    return sparse._Thin(noise(4, shape[1], seed=seed).float(), noise(shape[0], 4, seed=seed + 1).float() * rows)


@pytest.mark.parametrize("share", [1e-5, 0.01, 0.2, 0.5, 0.9, 0.99999])
def test_thresholds_of_large_matrices_are_exact(share: float) -> None:
    shape = (700, 900)
    assert shape[0] * shape[1] > 4 * sparse._SAMPLE, "a sample is taken"
    scratch = torch.empty(shape)
    kept = max(1, int(share * scratch.numel()))
    rows = Workshop().rows(shape)
    assert len(rows) > 1
    found = smallest_kept(thin(shape), rows, kept, scratch, Workshop())
    magnitudes = torch.cat([thin(shape).entries(part) for part in rows]).abs()
    assert float(found) == float(magnitudes.flatten().sort(descending=True).values[kept - 1])
    assert torch.equal(scratch, magnitudes)
    assert float(kth_largest_by_bits(scratch, kept, ALONE)) == float(found), "as a GPU finds it"


@pytest.mark.parametrize("bracket", [(0.0, 1e-3), (1e9, math.inf), (5.0, 5.0)])
def test_a_misleading_sample_costs_time_only(bracket: tuple[float, float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "_bracket", lambda *_: bracket)
    shape, scratch = (60, 70), torch.empty(60, 70)
    found = smallest_kept(thin(shape), ALONE.rows(shape), 1000, scratch, ALONE)
    assert float(found) == float(scratch.flatten().sort(descending=True).values[999])


def test_ties_keeps_exactly_the_share() -> None:
    shape = (700, 900)
    settings = merge_settings("ties", 1, density=0.2)
    entries = merged_entries("x", parents(shape, count=1), settings, 0, ALONE)
    assert int(entries.count_nonzero()) == int(0.2 * entries.numel())


class Counter:
    """A gate that knows who is inside and how much was done between two ways given."""

    def __init__(self) -> None:
        self.inside = False
        self.turns = 0
        self.ways = 0

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        assert not self.inside, "entered twice"
        self.inside, self.turns = True, self.turns + 1
        try:
            yield
        finally:
            self.inside = False

    def give_way(self) -> None:
        assert self.inside
        self.ways += 1


@pytest.mark.parametrize("method", ["weighted", "svd", *METHODS])
def test_everything_takes_its_turn_in_pieces(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Counter()
    outside: list[str] = []
    # Every product, draw and decomposition: none of them outside of the gate where the CPU is what is shared.
    for module, name in (
        (torch, "mm"),
        (torch, "rand"),
        (torch, "stack"),
        (torch.linalg, "qr"),
        (torch.linalg, "eigh"),
    ):
        original = getattr(module, name)

        def watched(*args: Any, _original: Any = original, _name: str = name, **kwargs: Any) -> Any:
            if not gate.inside:
                outside.append(_name)
            return _original(*args, **kwargs)

        monkeypatch.setattr(module, name, watched)
    shape, numbers = (560, 640), 20_000
    fields = {} if method in METHODS else {"density": None}
    merge_layer("x", parents(shape), merge_settings(method, rank=4, **fields), 0, Workshop(gate=gate, numbers=numbers))
    assert outside == []
    assert not gate.inside
    if method in METHODS:
        pieces = shape[0] * shape[1] // numbers
        assert gate.turns >= pieces, "each piece of entries is a turn"
        assert gate.ways >= 7 * pieces, "each pass over the matrix, four blocks at least, gives way after each piece"
    else:
        assert gate.turns == 1


class Apart(Workshop):
    """As on a GPU, whose turn does not cover what the CPU does."""

    def host(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class Inside(TorchDispatchMode):
    """Operators that run inside the gate."""

    def __init__(self, gate: Counter) -> None:
        super().__init__()
        self.gate = gate
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.gate.inside:
            self.names.add(str(function).split(".")[1])
        return function(*args, **(kwargs or {}))


def test_nothing_in_a_turn_waits_for_a_gpu() -> None:
    """Numbers asked for, sizes that depend on numbers, decompositions, draws, tensors made of Python's numbers."""
    gate = Counter()
    shop = Apart(gate=gate, numbers=50_000)
    waiting = {"_local_scalar_dense", "nonzero", "index", "masked_select", "lift_fresh", "rand", "randn", "randint"}
    waiting |= {"linalg_qr", "_linalg_eigh", "linalg_eigvalsh", "_linalg_svd", "sort", "unique"}
    with Inside(gate) as inside:
        for method in ("dare_linear", "dare_ties"):
            merge_layer("x", parents((560, 640)), merge_settings(method), 0, shop)
        kth_largest_by_bits(torch.rand(30, 40), 17, shop)
    assert {"mm", "addmm", "where", "relu_"} <= inside.names, "it looks at the right place"
    assert not inside.names & waiting


def test_an_error_leaves_the_gate() -> None:
    gate = Counter()
    matrix = DenseMatrix(torch.ones(4, 3), Workshop(gate=gate))

    class Stop(Exception):
        pass

    def stop() -> None:
        raise Stop

    gate.give_way = stop  # type: ignore[method-assign]
    with pytest.raises(Stop):
        matrix.energy()
    assert not gate.inside


@pytest.mark.parametrize("method", METHODS)
def test_the_plan_counts_what_is_allocated(method: str) -> None:
    """At least the merged entries, a piece of every parent, and a Gram matrix of the smaller side."""
    for shape, count in (((9216, 2560), 2), ((2560, 9216), 16), ((32, 2560), 4)):
        settings = merge_settings(method, rank=64)
        planned = working_bytes(shape, count, settings, ALONE)
        assert planned > 4 * shape[0] * shape[1] + max(4 * 2**19, 8 * min(shape) ** 2)
        assert planned < 3 * (4 * shape[0] * shape[1] + 8 * min(shape) ** 2) + 2**26
    assert working_bytes((9216, 2560), 2, merge_settings("svd", density=None), ALONE) == 0


def test_a_matrix_of_something_else_is_refused() -> None:
    for numbers in (torch.ones(3), torch.ones(2, 2, dtype=torch.bfloat16), torch.ones(0, 3)):
        with pytest.raises(ValueError, match="no dense matrix"):
            DenseMatrix(numbers, ALONE)
    with pytest.raises(ValueError, match="at least one number"):
        Workshop(numbers=0)
    assert singular._ROUNDING.keys() == {torch.float32, torch.float64}
