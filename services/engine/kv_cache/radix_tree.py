"""A radix tree over histories of tokens: nodes are runs of any length, and a path from the root spells a history.

Only the structure lives here; what nodes hold of a history, and when it goes, is the prefix cache's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from services.engine.kv_cache.keys import TOKEN_BYTES, Key, Namespace, common_tokens


class InFlightNodes:
    """A step in flight, and the nodes that were added for what it computes when it was planned. Their memory can be
    given to later steps, but nobody goes on from them before it has run."""

    __slots__ = ("nodes",)

    def __init__(self) -> None:
        self.nodes: list[Node] = []


class Node:
    """The tokens from ``start`` to ``end`` of all histories below it."""

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
        """None: the root, or no longer in the tree."""
        self.label = label
        """Its tokens, TOKEN_BYTES each."""
        self.start = start
        self.end = start + len(label) // TOKEN_BYTES
        self.children: dict[bytes, Node] = {}
        """By their first token."""
        self.blocks: list[int] | None = None
        """KV on the device, of the blocks ``start // block_size`` to the one of the last token; None: it is not there.
        Where a node begins inside of a block, that block has the tokens before it as well."""
        self.slot = 0
        """Of the state behind its last token, on the device; 0: it is not there."""
        self.pending: InFlightNodes | None = None
        """Of the step in flight that computes its KV or writes its state; None: what there is is certain."""
        self.pins = 0
        """Steps and copies under way that read the slot or the blocks."""
        self.key: Key | None = None
        """Under which the tiers have the state, and the KV from the entry before; None: they have not."""
        self.saving = False
        self.transient = False
        """Nobody goes on from it once the requests that live now have ended: it is not for the tiers."""

    def path(self) -> list[Node]:
        """From behind the root down to this node."""
        nodes: list[Node] = []
        node: Node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def tokens(self, start: int = 0) -> bytes:
        """Those of its history from ``start`` on."""
        labels = [node.label for node in self.path() if node.end > start]
        first = self
        while first.parent is not None and first.start > start:
            first = first.parent
        return b"".join(labels)[(start - first.start) * TOKEN_BYTES :]


@dataclass(slots=True)
class PrefixMatch:
    """How far a history is in the tree."""

    nodes: list[Node] = field(default_factory=list)
    """Those whose tokens it has all of, without the root."""
    matched: int = 0
    """Tokens that are in the tree: up to the end of the last node, or into one of its children."""
    diverging: Node | None = None
    """The child inside of which the history goes another way; None: it does so nowhere, or at the end of a node."""


class RadixTree:
    """All histories, by the space that they are shared in."""

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
        """Made if there is none."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(namespace, None, b"", 0)
            root.blocks = []
        return root

    def find(self, namespace: Namespace, tokens: bytes, before: PrefixMatch | None = None) -> PrefixMatch:
        """The path of a history as far as it is there.

        Args:
            before: what was found for this history, or for a beginning of it, at some time: what has been compared
                then is not compared again.
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
        """A path up to the deepest node that was on the way before and still is, and that node or the root."""
        for node in reversed(before.nodes if before is not None else ()):
            if node.parent is not None:
                # Not the nodes as they were: some may have been cut in two.
                return PrefixMatch(node.path()), node
        return PrefixMatch(), self._roots.get(namespace)

    def descend(self, node: Node, tokens: bytes) -> tuple[Node, Node | None]:
        """The child of ``node`` on the way of a longer history, made or cut so that the history has all of its tokens.

        Returns:
            The child, and what was cut: the node that now follows it, None if none was.
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
        """Puts a node of its first ``count`` tokens before the rest of a node."""
        if node.parent is None:
            raise ValueError("a root has no tokens to cut")
        split = count * TOKEN_BYTES
        upper = Node(node.namespace, node.parent, node.label[:split], node.start)
        node.parent.children[upper.label[:TOKEN_BYTES]] = upper
        node.parent, node.label, node.start = upper, node.label[split:], upper.end
        upper.children[node.label[:TOKEN_BYTES]] = node
        return upper

    def remove(self, node: Node) -> Node:
        """Takes a node without children out; returns its parent. A root without children goes as well."""
        parent = node.parent
        if parent is None or node.children:
            raise ValueError("only nodes without children can be removed")
        del parent.children[node.label[:TOKEN_BYTES]]
        node.parent = None
        if parent.parent is None and not parent.children:
            del self._roots[parent.namespace]
        return parent
