"""Radix tree over token prefixes: a node is a run of tokens of any length, and a path from the root spells a prefix.

This module has the structure only. The prefix cache decides what nodes hold and when it is evicted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from services.engine.kv_cache.keys import TOKEN_BYTES, Key, Namespace, common_tokens


class InFlightNodes:
    """Nodes that a step in flight computes. They are added when the step is planned: later steps may get their memory,
    but no sequence resumes from them before the step has run."""

    __slots__ = ("nodes",)

    def __init__(self) -> None:
        self.nodes: list[Node] = []


class Node:
    """Node of the radix tree: the tokens from ``start`` to ``end`` of every prefix that passes it."""

    __slots__ = (
        "blocks",
        "children",
        "end",
        "key",
        "label",
        "namespace",
        "parent",
        "pending",
        "pins",
        "saving",
        "slot",
        "start",
        "transient",
    )

    def __init__(self, namespace: Namespace, parent: Node | None, label: bytes, start: int) -> None:
        self.namespace = namespace
        self.parent = parent
        """Parent node; None: the root, or a node that is no longer in the tree."""
        self.label = label
        """Tokens of the node, TOKEN_BYTES each."""
        self.start = start
        self.end = start + len(label) // TOKEN_BYTES
        self.children: dict[bytes, Node] = {}
        """Child nodes by their first token."""
        self.blocks: list[int] | None = None
        """KV blocks on the device, from ``start // block_size`` to the block of the last token; None: not on the
        device. If the node begins inside a block, that block has the tokens before it as well."""
        self.slot = 0
        """Slot of the state snapshot behind the last token, on the device; 0: there is none."""
        self.pending: InFlightNodes | None = None
        """Step in flight that computes the KV or writes the state; None: both are computed."""
        self.pins = 0
        """Number of steps and copies in progress that read the slot or the blocks."""
        self.key: Key | None = None
        """Key of the tiers' entry that ends here; None: there is none."""
        self.saving = False
        self.transient = False
        """True where no later request will resume from the node, so that it is not saved to the tiers."""

    def path(self) -> list[Node]:
        """Nodes from below the root down to this one."""
        nodes: list[Node] = []
        node: Node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def tokens(self, start: int = 0) -> bytes:
        """Tokens of the prefix that ends here, from ``start`` on."""
        labels = [node.label for node in self.path() if node.end > start]
        first = self
        while first.parent is not None and first.start > start:
            first = first.parent
        return b"".join(labels)[(start - first.start) * TOKEN_BYTES :]


@dataclass(slots=True)
class PrefixMatch:
    """Match of a token sequence with the tree."""

    nodes: list[Node] = field(default_factory=list)
    """Nodes that match as a whole, from below the root."""
    matched: int = 0
    """Number of matching tokens: up to the end of the last node, or into one of its children."""
    diverging: Node | None = None
    """Child inside which the tokens diverge; None: they do not, or at the end of a node."""


class RadixTree:
    """Radix tree with one root for each cache namespace."""

    def __init__(self) -> None:
        self._roots: dict[Namespace, Node] = {}

    def __iter__(self) -> Iterator[Node]:
        """Every node but the roots, parents first."""
        stack = list(self._roots.values())
        while stack:
            children = stack.pop().children.values()
            yield from children
            stack.extend(children)

    def root(self, namespace: Namespace) -> Node:
        """Root of a namespace, made if there is none."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(namespace, None, b"", 0)
            root.blocks = []
        return root

    def name(self, namespace: Namespace) -> None:
        """Has the root of a namespace, if there is one, say what the namespace was made from."""
        root = self._roots.get(namespace)
        if root is not None and root.namespace.source is None:
            root.namespace = namespace

    def find(self, namespace: Namespace, tokens: bytes, before: PrefixMatch | None = None) -> PrefixMatch:
        """Longest match of a token sequence.

        Args:
            before: an earlier match of this sequence, or of a prefix of it. Its tokens are not compared again.
        """
        match, node = self._resume(namespace, before)
        while node is not None:
            match.matched = at = node.end
            child = node.children.get(tokens[at * TOKEN_BYTES : (at + 1) * TOKEN_BYTES])
            if child is None:
                return match
            if before is not None and child is before.diverging:
                match.matched, match.diverging = before.matched, child
                return match
            same = common_tokens(child.label, tokens, at)
            if same < child.end - child.start:
                match.matched = at + same
                if match.matched * TOKEN_BYTES < len(tokens):
                    match.diverging = child
                return match
            match.nodes.append(child)
            node = child
        return match

    def _resume(self, namespace: Namespace, before: PrefixMatch | None) -> tuple[PrefixMatch, Node | None]:
        """Match up to the deepest node of an earlier match that is still in the tree, and that node or the root."""
        for node in reversed(before.nodes if before is not None else ()):
            if node.parent is not None:
                # Not the nodes of the earlier match: some may have been split since.
                return PrefixMatch(node.path()), node
        return PrefixMatch(), self._roots.get(namespace)

    def descend(self, node: Node, tokens: bytes) -> tuple[Node, Node | None]:
        """Child of ``node`` towards the end of ``tokens``, made or split so that all of its tokens match.

        Returns:
            The child, and the node that was split off below it; None: nothing was split.
        """
        at = node.end
        first = tokens[at * TOKEN_BYTES : (at + 1) * TOKEN_BYTES]
        child = node.children.get(first)
        if child is None:
            child = node.children[first] = Node(node.namespace, node, tokens[at * TOKEN_BYTES :], at)
            return child, None
        same = common_tokens(child.label, tokens, at)
        if same == child.end - child.start:
            return child, None
        return self._cut(child, same), child

    def _cut(self, node: Node, count: int) -> Node:
        """Splits a node behind its first ``count`` tokens; returns the upper part."""
        if node.parent is None:
            raise ValueError("a root has no tokens to cut")
        split = count * TOKEN_BYTES
        upper = Node(node.namespace, node.parent, node.label[:split], node.start)
        node.parent.children[upper.label[:TOKEN_BYTES]] = upper
        node.parent, node.label, node.start = upper, node.label[split:], upper.end
        upper.children[node.label[:TOKEN_BYTES]] = node
        return upper

    def remove(self, node: Node) -> Node:
        """Removes a node without children and returns its parent. A root without children is removed as well."""
        parent = node.parent
        if parent is None or node.children:
            raise ValueError("only nodes without children can be removed")
        del parent.children[node.label[:TOKEN_BYTES]]
        node.parent = None
        if parent.parent is None and not parent.children:
            del self._roots[parent.namespace]
        return parent
