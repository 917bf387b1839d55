"""Common prefixes of prompts that are not computed yet: one of them computes a prefix, the others wait for it until the
step that computes it has run.

The prompts are in a radix tree of their own. At a node where it branches, or ends, with more than one prompt below, a
state is worth saving. The first prompt to be computed promises it; those of worse rank wait for it instead of computing
the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.engine.kv_cache.keys import TOKEN_BYTES, Namespace
from services.engine.kv_cache.radix_tree import Node, RadixTree
from services.engine.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Promise:
    """Promise of a sequence to save the state behind the first ``position`` tokens of its prompt."""

    sequence: Sequence
    position: int
    node: Node
    """Node of the tree of waiting prompts in which the position lies."""


class PendingPrefixes:
    """Radix tree of all prompts that are not computed yet, and the promises of their sequences."""

    def __init__(self) -> None:
        self._tree = RadixTree()
        self._counts: dict[Node, int] = {}
        self._ends: dict[Sequence, Node] = {}
        self._promises: dict[Node, list[Promise]] = {}
        self._made: dict[Sequence, list[Promise]] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, sequence: Sequence) -> None:
        """Adds the prompt of a sequence, unless it is there."""
        if sequence in self._ends:
            return
        tokens = sequence.prompt
        node, end = self._tree.root(Namespace(sequence.namespace)), len(tokens) // TOKEN_BYTES
        while node.end < end:
            node, rest = self._tree.descend(node, tokens)
            if rest is not None:
                self._counts[node] = self._counts[rest]
                self._divide(node, rest)
            self._counts[node] = self._counts.get(node, 0) + 1
        self._ends[sequence] = node

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence whose prompt is computed, or will not be."""
        node = self._ends.pop(sequence, None)
        while node is not None and node.parent is not None:
            above = node.parent
            self._counts[node] -= 1
            if not self._counts[node]:
                del self._counts[node]
                for promise in list(self._promises.get(node, ())):
                    self._drop(promise)
                self._tree.remove(node)
            node = above

    def withdraw(self, sequence: Sequence) -> None:
        """Withdraws all promises of a sequence."""
        for promise in list(self._made.get(sequence, ())):
            self._drop(promise)

    def branches(self, sequence: Sequence) -> list[int]:
        """Lengths of the prefixes that other prompts share with this sequence's, the longest first."""
        found: list[int] = []
        node = self._ends.get(sequence)
        below = 1
        while node is not None and node.parent is not None:
            if self._counts[node] > below:
                found.append(node.end)
                below = self._counts[node]
            node = node.parent
        return found

    def promise(self, sequence: Sequence, positions: tuple[int, ...]) -> None:
        """Records the positions at which a sequence will save its state; earlier promises are withdrawn."""
        self.withdraw(sequence)
        node = self._ends.get(sequence)
        while node is not None and node.parent is not None:
            for position in positions:
                if node.start < position <= node.end:
                    self._list(Promise(sequence, position, node))
            node = node.parent

    def promised(self, sequence: Sequence, limit: int) -> int:
        """Longest prefix, at most ``limit`` tokens, whose state a sequence of better rank has promised; 0: none."""
        node = self._ends.get(sequence)
        while node is not None and node.parent is not None:
            positions = [
                promise.position
                for promise in self._promises.get(node, ())
                if promise.position <= limit and promise.sequence.rank < sequence.rank
            ]
            if positions:
                return max(positions)
            node = node.parent
        return 0

    def kept(self, sequence: Sequence, position: int) -> None:
        """Ends a promise: the state is saved, or will not be."""
        for promise in [made for made in self._made.get(sequence, ()) if made.position == position]:
            self._drop(promise)

    def _list(self, promise: Promise) -> None:
        self._promises.setdefault(promise.node, []).append(promise)
        self._made.setdefault(promise.sequence, []).append(promise)

    def _drop(self, promise: Promise) -> None:
        listed, made = self._promises[promise.node], self._made[promise.sequence]
        listed.remove(promise)
        made.remove(promise)
        if not listed:
            del self._promises[promise.node]
        if not made:
            del self._made[promise.sequence]

    def _divide(self, upper: Node, lower: Node) -> None:
        """Moves the promises of a node that was split to the part that has their position."""
        for promise in list(self._promises.get(lower, ())):
            if promise.position <= upper.end:
                self._drop(promise)
                self._list(Promise(promise.sequence, promise.position, upper))
