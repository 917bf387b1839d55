"""Log-probabilities of given tokens behind given prefixes, from the torch forward or from the whole engine."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from kernels.attention import write_pages
from services.common.adapters.registry import AdapterRegistry
from services.common.storage.object_store import ObjectStore
from services.engine.models.batch import ForwardBatch
from services.engine.models.footprint import Quantization
from services.engine.models.qwen3_5.model import Qwen3_5
from services.engine.requests.adapter import AdapterChoice
from services.engine.requests.outputs import SequenceUpdate
from services.engine.requests.sampling_params import SamplingParams
from services.engine.requests.submission import Submission
from services.engine.settings import EngineSettings
from services.pod.engine import build_engine
from services.pod.preflight import use_kernel_cache

_BLOCK = 16
_TOKENS_AT_ONCE = 2048
_FP8_MAX = 448.0
_FORCED = 100.0
"""Bias that has the engine sample the token whose log-probability is wanted; the log-probability is without it."""
_SCORE_SECONDS = 240.0
"""Time for the engine to answer all queries."""


@dataclass(frozen=True, slots=True)
class Query:
    """A token and what stands before it."""

    prefix: tuple[int, ...]
    token: int


@dataclass(frozen=True, slots=True)
class Mode:
    """Storage of weights, KV and states by the names of the settings, and what the weights are loaded from."""

    quantization: Quantization = "none"
    kv_cache_dtype: str = "auto"
    state_dtype: str = "float32"
    float8_checkpoint: bool = False
    """Loaded from a checkpoint in float8, with a scale for 128 × 128 numbers."""
    prefill_float8: str = "none"
    """Products of prompts in float8; here of all rows, however few."""

    @property
    def name(self) -> str:
        """Like "int4 + kv fp8"."""
        parts: list[str] = [self.quantization if self.quantization != "none" else "bf16"]
        parts[0] += " of an fp8 checkpoint" if self.float8_checkpoint else ""
        parts += ["kv fp8"] if self.kv_cache_dtype == "fp8" else []
        parts += ["state bf16"] if self.state_dtype == "bfloat16" else []
        parts += [f"prompts {self.prefill_float8}"] if self.prefill_float8 != "none" else []
        return " + ".join(parts)


@contextmanager
def float8_pages() -> Iterator[None]:
    """Rounds keys and values of the torch forward to what float8 pages hold: e4m3, scaled by the largest magnitude of
    each token and head."""

    def rounded(pages: Tensor, slots: Tensor, values: Tensor) -> None:
        scale = values.abs().amax(-1, keepdim=True).float().clamp_min(1e-30) / _FP8_MAX
        stored = (values.float() / scale).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
        write_pages(pages, slots, (stored.float() * scale).to(values.dtype))

    with mock.patch("services.engine.models.qwen3_5.layers.write_pages", rounded):
        yield


class TorchScorer:
    """The plain forward: quantized weights are multiplied out, so this is the error of their rounding alone."""

    def __init__(self, model: Qwen3_5, *, float8_kv: bool = False) -> None:
        self._model, self._float8_kv = model, float8_kv

    def score(self, queries: Sequence[Query]) -> list[float]:
        """One log-probability a query. A prefix that another one begins with costs nothing extra."""
        found: dict[Query, float] = {}
        for texts in _batches(_longest({query.prefix for query in queries})):
            wanted = {text[:end] for text in texts for end in range(1, len(text) + 1)}
            asked = [query for query in dict.fromkeys(queries) if query.prefix in wanted and query not in found]
            prefixes = list(dict.fromkeys(query.prefix for query in asked))
            rows = {prefix: row for row, prefix in enumerate(prefixes)}
            logits = self._logits(texts, [_place(prefix, texts) for prefix in prefixes])
            at = [rows[query.prefix] for query in asked]
            values = torch.log_softmax(logits, -1)[at, [query.token for query in asked]]
            found |= dict(zip(asked, values.tolist(), strict=True))
        return [found[query] for query in queries]

    def _logits(self, texts: Sequence[tuple[int, ...]], rows: Sequence[int]) -> Tensor:
        """[rows, vocab] float32 of some rows of the texts end to end."""
        lengths = [len(text) for text in texts]
        blocks = [-(-length // _BLOCK) for length in lengths]
        tables = torch.zeros(len(texts), max(blocks), dtype=torch.int64)
        positions, places, begin = [], [], 1
        for row, (length, count) in enumerate(zip(lengths, blocks, strict=True)):
            tables[row, :count] = torch.arange(begin, begin + count)
            positions.append(torch.arange(length))
            places.append(begin * _BLOCK + positions[-1])
            begin += count
        device = self._model.device
        batch = ForwardBatch(
            token_ids=torch.tensor([token for text in texts for token in text], device=device),
            positions=torch.cat(positions).to(device),
            kv_slots=torch.cat(places).to(device),
            block_tables=tables.to(device),
            state_slots=torch.arange(1, len(texts) + 1, device=device),
            adapter_slots=torch.zeros(len(texts), dtype=torch.int64, device=device),
            has_adapters=False,
            num_decodes=0,
            lengths=lengths,
            starts=[0] * len(texts),
            logit_rows=torch.tensor(rows, device=device),
        )
        cache = self._model.allocate_cache(begin, _BLOCK, len(texts) + 1)
        if self._float8_kv:
            with float8_pages():
                return self._model.logits(self._model.forward(batch, cache, None))
        return self._model.logits(self._model.forward(batch, cache, None))


class EngineScorer:
    """The engine as a pod builds it: real kernels, quantized products, float8 pages. Use as a context manager."""

    def __init__(self, model: Path, mode: Mode) -> None:
        values: dict[str, Any] = {
            "model": model,
            "quantization": mode.quantization,
            "kv_cache_dtype": mode.kv_cache_dtype,
            "state_dtype": mode.state_dtype,
            "prefill_float8": mode.prefill_float8,
            "prefill_float8_rows": 1,
            "prefix_cache": False,
            "max_waiting": 1_000_000,
            # A small plan, so that engines after one another fit; graphs would only take time.
            "max_num_seqs": 64,
            "token_budget": 2048,
            "max_model_len": 1024,
            "num_blocks": 1 + 64 * 64,
            "train_memory_bytes": 1,
            "trainer": False,
            "cuda_graphs": 0,
        }
        settings = EngineSettings(**values)
        use_kernel_cache(settings)
        self._engine = build_engine(settings, AdapterRegistry(ObjectStore(settings), "quality"), None)
        self._runs = 0

    def __enter__(self) -> EngineScorer:
        self._engine.loop.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.loop.stop()
        del self._engine
        gc.collect()  # its parts refer to each other
        torch.cuda.empty_cache()

    def score(self, queries: Sequence[Query]) -> list[float]:
        """One log-probability a query, each a request of one token.

        Raises:
            RuntimeError: a request failed or the engine sampled something else.
        """
        self._runs += 1
        found: dict[str, float] = {}
        failed: list[str] = []
        done = threading.Event()
        names = {f"{self._runs}-{index}": query for index, query in enumerate(queries)}

        def sink(updates: list[SequenceUpdate]) -> None:
            for update in updates:
                if update.error is not None:
                    failed.append(str(update.error))
                elif update.token is not None:
                    if update.token.token_id != names[update.request_id].token:
                        failed.append(f"{update.request_id}: the bias did not decide the token")
                    found[update.request_id] = update.token.sampling_logprob
            if failed or len(found) == len(names):
                done.set()

        for name, query in names.items():
            sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logit_bias={query.token: _FORCED})
            self._engine.loop.submit(Submission(name, query.prefix, sampling, AdapterChoice()), sink)
        if not done.wait(_SCORE_SECONDS):
            failed.append(f"{len(names) - len(found)} of {len(names)} requests had no token in {_SCORE_SECONDS:.0f} s")
        if failed:
            raise RuntimeError(failed[0])
        return [found[name] for name in names]


def _longest(prefixes: Set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Prefixes that no other one begins with."""
    ordered = sorted(prefixes)  # a prefix stands right before what begins with it
    return [text for text, following in zip(ordered, [*ordered[1:], ()], strict=True) if following[: len(text)] != text]


def _place(prefix: tuple[int, ...], texts: Sequence[tuple[int, ...]]) -> int:
    """The row of a prefix' last token among the texts end to end."""
    begin = 0
    for text in texts:
        if text[: len(prefix)] == prefix:
            return begin + len(prefix) - 1
        begin += len(text)
    raise ValueError("no text begins with the prefix")


def _batches(texts: Sequence[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    """Runs of texts of some thousand tokens together."""
    batch: list[tuple[int, ...]] = []
    for text in texts:
        if batch and sum(map(len, batch)) + len(text) > _TOKENS_AT_ONCE:
            yield batch
            batch = []
        batch.append(text)
    if batch:
        yield batch
