"""Training batches: worker processes render and tokenize, the trainer gets fixed shapes.

Documents are not packed: each row is one conversation, padded on the right to its bucket. Every layer is causal, so
the padding needs no mask, no state leaks from one document into the next, and a bucket is one static shape.
"""

from __future__ import annotations

import itertools
import multiprocessing
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from models.tiny.recipe.data import DIRECTORY, END, chat_template, prompt_text, training_items

BUCKETS = (32, 64, 128, 256, 352)
"""Row lengths, in tokens."""
IGNORE = -100

Array = np.ndarray[Any, Any]
Document = tuple[Array, int]
"""Token ids (uint16) and how many of them are the prompt."""


@dataclass(frozen=True, slots=True)
class Batch:
    """tokens: int64 [rows, bucket]; labels: int64 of the same shape, the next token or IGNORE."""

    tokens: Array
    labels: Array


def make_shard(arguments: tuple[int, int, int]) -> tuple[Array, Array, Array]:
    """(seed, shard, count) → the documents' token ids in one array, their lengths, their prompts' lengths."""
    seed, shard, count = arguments
    tokenizer, template = Tokenizer.from_file(str(DIRECTORY / "tokenizer.json")), chat_template()
    items = list(itertools.islice(training_items(f"train {seed} {shard}"), count))
    prompts = tokenizer.encode_batch_fast([prompt_text(item, template) for item in items])
    completions = tokenizer.encode_batch_fast([item.completion() + END for item in items])
    rows = [prompt.ids + completion.ids for prompt, completion in zip(prompts, completions, strict=True)]
    return (
        np.fromiter(itertools.chain.from_iterable(rows), dtype=np.uint16),
        np.array([len(row) for row in rows]),
        np.array([len(prompt.ids) for prompt in prompts]),
    )


def shards(seed: int, *, workers: int, count: int = 4096) -> Iterator[list[Document]]:
    """Endless shards in order, made ahead by worker processes."""
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        ready: queue.Queue[Any] = queue.Queue()
        shard = 0
        for _ in range(3 * workers):
            ready.put(pool.apply_async(make_shard, ((seed, shard, count),)))
            shard += 1
        while True:
            result = ready.get().get()
            ready.put(pool.apply_async(make_shard, ((seed, shard, count),)))
            shard += 1
            tokens, lengths, prompts = result
            yield list(zip(np.split(tokens, np.cumsum(lengths)[:-1]), prompts.tolist(), strict=True))


def _pad(documents: list[Document], bucket: int) -> Batch:
    tokens = np.zeros((len(documents), bucket), dtype=np.int64)
    labels = np.full((len(documents), bucket), IGNORE, dtype=np.int64)
    for row, (ids, prompt) in enumerate(documents):
        tokens[row, : len(ids)] = ids
        labels[row, prompt - 1 : len(ids) - 1] = ids[prompt:]
    return Batch(tokens, labels)


def batches(seed: int, *, tokens_per_batch: int, workers: int) -> Iterator[list[Batch]]:
    """Endless optimizer steps: one batch per bucket, each with a fixed number of rows.

    The rows of a bucket are its share of the mixture, so that every step sees every skill. ``tokens_per_batch`` counts
    padding.
    """
    source = shards(seed, workers=workers)
    waiting: dict[int, list[Document]] = {bucket: [] for bucket in BUCKETS}

    def refill() -> None:
        for ids, prompt in next(source):
            bucket = next((size for size in BUCKETS if len(ids) <= size), None)
            if bucket is not None:
                waiting[bucket].append((ids, prompt))

    while sum(map(len, waiting.values())) < 20_000:
        refill()
    documents = sum(map(len, waiting.values()))
    padded = sum(bucket * len(rows) for bucket, rows in waiting.items())
    rows = {
        bucket: max(1, round(tokens_per_batch / (padded / documents) * len(queue_) / documents))
        for bucket, queue_ in waiting.items()
    }
    while True:
        while any(len(waiting[bucket]) < rows[bucket] for bucket in BUCKETS):
            refill()
        step = [_pad(waiting[bucket][: rows[bucket]], bucket) for bucket in BUCKETS]
        for bucket in BUCKETS:
            # Stragglers of a bucket that fills faster than its share are dropped, or they would pile up.
            waiting[bucket] = waiting[bucket][rows[bucket] :][-50_000:]
        yield step


def ahead(source: Iterator[Any], depth: int = 8) -> Iterator[Any]:
    """The same items, prepared by a thread while the caller computes."""
    ready: queue.Queue[Any] = queue.Queue(depth)

    def fill() -> None:
        for item in source:
            ready.put(item)

    threading.Thread(target=fill, daemon=True).start()
    while True:
        yield ready.get()
