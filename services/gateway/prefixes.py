"""Which prompts an engine has been given: a bounded memory of hashes, one a block of tokens.

Each hash stands for the whole prompt up to the end of its block, so the blocks that two prompts have in common from
their beginning on have equal hashes, and what was routed to an engine is found by how many of them it has seen.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

BLOCK_TOKENS = 64
_MOST_BLOCKS = 1024
"""Of a prompt. Who has 65,536 tokens of it is the right engine, and the cost of finding out is bounded."""
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


class PrefixIndex:
    """The prompts of one engine, the least recently routed forgotten first, and of a prompt its end first.

    Args:
        capacity: blocks.

    Raises:
        ValueError: it is not positive.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity {capacity} must be at least 1")
        self._capacity = capacity
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        """Least recent first. Every hash of a chain is more recent than those behind it, so what is known of a chain
        is always its beginning."""

    def __len__(self) -> int:
        return len(self._blocks)

    def matched(self, chain: Sequence[bytes]) -> int:
        """How many blocks of a prompt were routed here before."""
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high + 1) // 2
            if chain[middle - 1] in self._blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def add(self, chain: Sequence[bytes]) -> None:
        """Remembers a prompt that is routed here."""
        blocks = self._blocks
        for block in reversed(chain[: self._capacity]):
            blocks[block] = None
            blocks.move_to_end(block)
        while len(blocks) > self._capacity:
            blocks.popitem(last=False)

    def clear(self) -> None:
        """The engine has forgotten all."""
        self._blocks.clear()
