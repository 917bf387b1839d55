"""Documents of a packed batch that go on from others, as the training kernels take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


def depth_first(parents: Sequence[int | None]) -> list[int]:
    """Numbers of the documents in an order in which a document and all behind it stand together, parents first.

    Raises:
        ValueError: one stands before the one that it goes on from.
    """
    behind: list[list[int]] = [[] for _ in parents]
    waiting: list[int] = []
    for index, parent in enumerate(parents):
        if parent is None:
            waiting.append(index)
        elif 0 <= parent < index:
            behind[parent].append(index)
        else:
            raise ValueError(f"document {index} stands before {parent}, which it goes on from")
    waiting.reverse()
    order = []
    while waiting:
        order.append(waiting.pop())
        waiting += reversed(behind[order[-1]])
    return order


@dataclass(frozen=True, slots=True)
class Tree:
    """Documents that go on from others, in depth-first order: so what sees a key are rows without a gap, from the key's
    own to the last of the documents behind."""

    parent: Tensor
    """[S] int32: document that each goes on from, -1: it begins."""
    until: Tensor
    """[S] int32: first row behind a document and all that are behind it."""
    kept: Tensor
    """[S] int32: place of the state behind a document among the states that others go on from, -1: none does."""
    place: Tensor
    """[S] int32: place of a document among those that go on from others, -1: it begins. Those behind one document have
    neighbouring places."""
    children: Tensor
    """[S + 1] int32: first place of those behind each document; they end where the next one's begin."""
    levels: tuple[Tensor, ...]
    """[n] int32 each: documents by the number of those before them, from none on."""
    sizes: tuple[int, int]
    """States that others go on from, and documents that go on from others."""
    starts: tuple[int, ...]
    """Tokens before each document, from its root on."""
    history: Tensor
    """[S · past] int64: rows of the last inputs before each document, from the farthest; 0 where there is none."""
    missing: Tensor
    """[S · past, 1] bool: there is none."""
    seen: Tensor
    """[N] int64: rows that a document behind theirs has in its history."""
    seen_begin: Tensor
    """[N + 1] int32: the first of each row's places in ``seen_by``."""
    seen_by: Tensor
    """[places in histories] int32: places in ``history`` by row."""

    @classmethod
    def build(cls, lengths: Sequence[int], parents: Sequence[int | None], device: torch.device, *, past: int) -> Tree:
        """Layout of documents in depth-first order.

        Args:
            past: inputs that a convolution looks back at.
        """
        count = len(lengths)
        above = [-1 if parent is None else parent for parent in parents]
        begins = [end - length for end, length in zip(accumulate(lengths), lengths, strict=True)]
        until = [begin + length for begin, length in zip(begins, lengths, strict=True)]
        depths, starts = [0] * count, [0] * count
        behind: list[list[int]] = [[] for _ in lengths]
        for index, parent in enumerate(above):
            if parent >= 0:
                behind[parent].append(index)
                depths[index], starts[index] = depths[parent] + 1, starts[parent] + lengths[parent]
        for index in reversed(range(count)):
            if (parent := above[index]) >= 0:
                until[parent] = max(until[parent], until[index])
        going_on = [index for indices in behind for index in indices]
        places = {index: place for place, index in enumerate(going_on)}
        states = {index: place for place, index in enumerate(at for at in range(count) if behind[at])}
        history: list[int] = []
        users: dict[int, list[int]] = {}
        for index in range(count):
            rows: list[int] = []
            at = above[index]
            while at >= 0 and len(rows) < past:
                end = begins[at] + lengths[at]
                rows += reversed(range(max(begins[at], end - past + len(rows)), end))
                at = above[at]
            rows += [-1] * (past - len(rows))
            for row in reversed(rows):
                if row >= 0:
                    users.setdefault(row, []).append(len(history))
                history.append(row)
        seen = sorted(users)

        def integers(values: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(device)

        return cls(
            parent=integers(above),
            until=integers(until),
            kept=integers([states.get(index, -1) for index in range(count)]),
            place=integers([places.get(index, -1) for index in range(count)]),
            children=integers([0, *accumulate(map(len, behind))]),
            levels=tuple(
                integers([index for index in range(count) if depths[index] == level])
                for level in range(max(depths) + 1)
            ),
            sizes=(len(states), len(places)),
            starts=tuple(starts),
            history=integers([max(0, row) for row in history], torch.int64),
            missing=integers([row < 0 for row in history], torch.bool)[:, None],
            seen=integers(seen, torch.int64),
            seen_begin=integers([0, *accumulate(len(users[row]) for row in seen)]),
            seen_by=integers([place for row in seen for place in users[row]]),
        )

    def past(self, x: Tensor, *, out: Tensor) -> Tensor:
        """Inputs before each document.

        Args:
            x: [T, channels].
            out: [S, past, channels] contiguous, where to write: zeros where there are none.
        """
        flat = out.view(-1, x.shape[1])
        torch.index_select(x, 0, self.history, out=flat)
        flat.masked_fill_(self.missing, 0)
        return out
