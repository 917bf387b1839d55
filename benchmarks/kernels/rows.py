"""Cases of benchmarks.kernels.all: norms, activations, embeddings, sampling."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks.kernels.timing import Case, Tensors, Work
from services.engine.requests.request import Request
from services.engine.requests.sampling_params import SamplingParams
from services.engine.scheduler.step_plan import Chunk

HIDDEN, INTERMEDIATE, VOCAB = 2560, 9216, 248_320
EPS = 1e-6


def norm(rows: int) -> Case:
    """Case of the norm with the residual."""

    def make(t: Tensors) -> Work:
        from kernels.gpu.rms_norm import rms_norm

        weight, delta = 1 + t.normal(HIDDEN, scale=0.1, dtype=torch.float32), t.zeros(rows, HIDDEN)
        xs = [t.normal(rows, HIDDEN) for _ in range(t.copies(2 * rows * HIDDEN))]
        x = xs[0].double()
        return Work(
            [partial(rms_norm, x, weight, EPS, delta) for x in xs],
            2 * rows * HIDDEN * 4,
            0,
            lambda result: (result, x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()),
        )

    return Case("rms_norm + residual", f"rows={rows}", make)


def activation(rows: int) -> Case:
    def make(t: Tensors) -> Work:
        from kernels.gpu.activations import swiglu

        xs = [t.normal(rows, 2 * INTERMEDIATE) for _ in range(t.copies(4 * rows * INTERMEDIATE))]

        def check(result: Tensor) -> tuple[Tensor, Tensor]:
            gate, up = xs[0].double().chunk(2, -1)
            return result, F.silu(gate) * up

        return Work([partial(swiglu, x) for x in xs], 6 * rows * INTERMEDIATE, 0, check)

    return Case("swiglu", f"rows={rows}", make)


def gather(rows: int) -> Case:
    def make(t: Tensors) -> Work:
        from kernels.gpu.copies.embedding import gather_tokens

        table = t.normal(VOCAB, HIDDEN)
        tokens = t.ints([(index * 7919) % VOCAB for index in range(rows)])
        slots = t.ints([0] * rows)
        return Work(
            [partial(gather_tokens, tokens, slots, slots, table)],
            4 * rows * HIDDEN,
            0,
            lambda result: (result, table[tokens.long()].double()),
        )

    return Case("gather_tokens", f"rows={rows}", make)


def sampling(rows: int, selections: int) -> Case:
    """``selections`` 0: temperature only; 3: top_p 0.9; 5: top_k 50 and top_p 0.9."""

    def make(t: Tensors) -> Work:
        from kernels.gpu.sampling.sample import RESULT_WORDS, SamplingBuffers, sample_rows
        from services.engine.executors.cuda.sampling.tables import SamplingTables

        logits = [t.normal(rows, VOCAB, scale=3.0, dtype=torch.float32) for _ in range(t.copies(4 * rows * VOCAB))]
        step = torch.stack((t.ints(range(1, rows + 1)), t.ints([3] * rows), t.ints([-1] * rows)))
        tables = SamplingTables([], rows + 1, VOCAB, t.device)
        features = tables.seat([_chunk(slot, selections) for slot in range(1, rows + 1)])
        buffers = SamplingBuffers.allocate(rows, VOCAB, t.device)
        last, results = t.ints([0] * (rows + 1)), t.zeros(rows, RESULT_WORDS, dtype=torch.int32)

        def run(x: Tensor) -> Tensor:
            sample_rows(
                x,
                step,
                tables.parameters,
                buffers,
                last,
                results,
                nucleus=features.nucleus,
                selections=features.selections,
                filters=features.filters,
            )
            return results

        def check(result: Tensor) -> tuple[Tensor, Tensor]:
            # The sampled token's own log-probability, which the kernel reports; of all tokens without filters.
            exact = torch.log_softmax(logits[0].double(), -1).gather(1, result[:, :1].long())
            return result[:, 1:2].view(torch.float32), exact

        return Work(
            [partial(run, x) for x in logits],
            4 * rows * VOCAB,
            0,
            check,
            {"torch softmax + exponential race": lambda: _torch_race(logits[0])},
        )

    label = {0: "temperature", 3: "top_p", 5: "top_k + top_p"}[selections]
    return Case("sample_rows", f"rows={rows} {label}", make)


def _torch_race(logits: Tensor) -> Tensor:
    """torch.multinomial waits for the device; this draws from the same distribution."""
    return (torch.softmax(logits, -1) / torch.empty_like(logits).exponential_()).argmax(-1)


def _chunk(slot: int, selections: int) -> Chunk:
    params = SamplingParams(
        top_k=50 if selections == 5 else 0, top_p=0.9 if selections else 1.0, seed=slot, max_tokens=9
    )
    return Chunk(Request(f"r{slot}", (1,), params), (1,), 3, (1,), slot, True, (1, 2, 3), 3)


def cases() -> Iterator[Case]:
    for rows in (1, 16, 64, 256, 8192):
        yield norm(rows)
        yield activation(rows)
        yield gather(rows)
    for rows in (1, 16, 64, 256):
        for selections in (0, 3, 5):
            yield sampling(rows, selections)
