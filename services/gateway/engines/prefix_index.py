"""Index of the prompts that an engine has been given: a bounded memory of hashes, one a block of tokens.

Each hash stands for the whole prompt up to the end of its block, so the blocks that two prompts have in common from
their beginning on have equal hashes, and what was routed to an engine is found by how many of them it has seen.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

BLOCK_TOKENS = 64
_MOST_BLOCKS = 1024
"""Most blocks that are looked up of a prompt. Who has 65,536 tokens of it is the right engine, and the cost of finding
out is bounded."""
_TOKEN_BYTES = array("I").itemsize
_HASH_BYTES = 8  # two prompts that meet by accident (one in 10**9 pairs of a full index) cost a routing, nothing else


def hash_chain(tokens: Sequence[int], salt: bytes) -> tuple[bytes, ...]:
    """The hashes of the whole blocks of a prompt, first to last.

    Args:
        tokens: ids below 2**32.
        salt: what else has to be equal for the engine to share its cache: adapter and cache salt.
    """
    step = BLOCK_TOKENS * _TOKEN_BYTES
    whole = min(len(tokens) // BLOCK_TOKENS, _MOST_BLOCKS)
    packed = memoryview(array("I", tokens[: whole * BLOCK_TOKENS])).cast("B")
    # As data: the salt that blake2b has of its own is at most 16 bytes long.
    hasher = blake2b(salt + b"\0", digest_size=_HASH_BYTES)
    chain: list[bytes] = []
    for start in range(0, whole * step, step):
        hasher.update(packed[start : start + step])
        chain.append(hasher.copy().digest())
    return tuple(chain)


def joined(chain: Sequence[bytes]) -> bytes:
    """A chain as one string, for the engine to tell other gateways."""
    return b"".join(chain)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Prediction of a prompt's cache hit, from what was known when it was routed."""

    chain: tuple[bytes, ...]
    time: int
    """Time of its routing, on the index's own clock, which counts prompts."""
    certain: int
    """Blocks of it that contain a hit which the engine has told before: it will be hit again, if it is still there."""


class _Block:
    """``routed``: the time of the last prompt that had it. ``hit``: of the last one whose hit ended in it; 0: none did.
    ``child``, ``others``: the blocks known behind it."""

    __slots__ = ("child", "hit", "others", "parent", "routed")

    def __init__(self, parent: bytes | None) -> None:
        self.parent = parent
        self.routed = 0
        self.hit = 0
        self.child: bytes | None = None
        self.others: set[bytes] | None = None
        """Few have more than one: a set for each would be most of the memory."""

    def link(self, name: bytes) -> None:
        if self.child is None:
            self.child = name
        else:
            self.others = self.others or set()
            self.others.add(name)

    def unlink(self, name: bytes) -> None:
        if self.child == name:
            self.child = self.others.pop() if self.others else None
        elif self.others is not None:
            self.others.discard(name)

    def children(self) -> tuple[bytes, ...]:
        return () if self.child is None else (self.child, *(self.others or ()))


class PrefixIndex:
    """The prompts of one engine, the least recently routed forgotten first, and of a prompt its end first.

    An engine gives up what it has cached without telling. But it tells of each prompt how much of it was there, and
    where that is less than it once told of the same beginning, what it had there is gone; and so is what lies behind
    that and was not used since, because engines give up first what they have not used for longest.

    That a hit is shorter than what two prompts have in common proves nothing: engines can go on from some places only,
    and what is still being computed cannot be hit yet. No hit was told of such places.

    Args:
        capacity: blocks.

    Raises:
        ValueError: it is not positive.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity {capacity} must be at least 1")
        self._capacity = capacity
        self._time = 0
        self._blocks: OrderedDict[bytes, _Block] = OrderedDict()
        """Least recent first. Every hash of a chain is more recent than those behind it, so what is known of a chain
        is always its beginning."""

    def __len__(self) -> int:
        return len(self._blocks)

    def matched(self, chain: Sequence[bytes]) -> int:
        """Number of blocks of a prompt that were routed to this engine before."""
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high + 1) // 2
            if chain[middle - 1] in self._blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def route(self, chain: tuple[bytes, ...], tokens: int) -> Prediction:
        """Remembers a prompt that is routed here, and says what the engine should have of it.

        Args:
            tokens: of the prompt, the last of which is always computed.
        """
        certain = min(self.matched(chain), (tokens - 1) // BLOCK_TOKENS)
        while certain > 0 and not self._blocks[chain[certain - 1]].hit:
            certain -= 1
        self.add(chain)
        return Prediction(chain, self._time, certain)

    def add(self, chain: Sequence[bytes]) -> None:
        """Remembers a prompt that is routed here."""
        self._time += 1
        blocks, chain = self._blocks, chain[: self._capacity]
        fresh: list[int] = []
        for place in range(len(chain) - 1, -1, -1):
            block = blocks.get(chain[place])
            if block is None:
                block = blocks[chain[place]] = _Block(chain[place - 1] if place else None)
                fresh.append(place)
            block.routed = self._time
            blocks.move_to_end(chain[place])
        for place in fresh:
            if place:
                blocks[chain[place - 1]].link(chain[place])
        while len(blocks) > self._capacity:
            self._remove(next(iter(blocks)))

    def heard(self, prompts: Iterable[bytes]) -> None:
        """Other gateways have routed prompts here.

        Args:
            prompts: hashes of their blocks, as ``joined`` makes them of a chain.
        """
        for hashes in prompts:
            chain = [hashes[at : at + _HASH_BYTES] for at in range(0, len(hashes), _HASH_BYTES)]
            if self.matched(chain) < len(chain):
                self.add(chain)

    def told(self, predicted: Prediction, tokens: int) -> None:
        """The engine has told how many tokens of a prompt it had when it came to it."""
        chain = predicted.chain
        end = -(-tokens // BLOCK_TOKENS)  # the hit ends in the last of so many blocks, or behind it
        lost = 0
        for name in chain[end : predicted.certain]:
            block = self._blocks.get(name)
            if block is not None and 0 < block.hit < predicted.time:  # none that was told of a later prompt
                lost, block.hit = max(lost, block.hit), 0
        if 0 < end <= len(chain) and (block := self._blocks.get(chain[end - 1])) is not None:
            block.hit = max(block.hit, predicted.time)
        if lost:
            self._forget(chain[end], lost)

    def clear(self) -> None:
        """The engine has forgotten all."""
        self._blocks.clear()

    def _forget(self, first: bytes, until: int) -> None:
        """Removes what was not routed after ``until`` of a block and those behind it."""
        found = [first] if first in self._blocks else []
        for name in found:  # it grows
            found += self._blocks[name].children()
        for name in reversed(found):  # no block was routed after the one before it
            if self._blocks[name].routed <= until:
                self._remove(name)

    def _remove(self, name: bytes) -> None:
        """A block behind which none is known."""
        parent = self._blocks.pop(name).parent
        if parent is not None:
            self._blocks[parent].unlink(name)
