"""Block pool: free list and reference counts of the KV blocks. Block 0 is scratch and never handed out."""

from __future__ import annotations

from collections.abc import Iterable


class IntegrityError(RuntimeError):
    """A block, slot or sequence is leaked, shared or freed twice: a bug, never a user's fault."""


class BlockPool:
    """Reference-counted KV blocks.

    Three kinds of holders have references to a block: each sequence that reads it; the prefix cache, once for each of
    its nodes that contains the block (two where one node ends and the next begins inside it); and each copy from or to
    a tier, until it ends. A block that only the cache holds counts as ``idle``: it is evicted when a live sequence
    needs it.

    Args:
        num_blocks: blocks in the KV buffers, scratch block 0 included.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (block 0 is scratch), got {num_blocks}")
        self._references = [0] * num_blocks
        self._cached = [0] * num_blocks
        """References of each block that the prefix cache holds."""
        # A stack: a block that was freed last is reused first, while it may still be in the processor's cache.
        self._free = list(range(num_blocks - 1, 0, -1))
        self._idle = 0
        self._copies: dict[int, int] = {}
        """References of each block that copies in progress hold."""
        self._copied = 0
        """Number of blocks that copies hold and no sequence does."""

    @property
    def total(self) -> int:
        """Number of usable blocks."""
        return len(self._references) - 1

    @property
    def free(self) -> int:
        """Number of blocks without references."""
        return len(self._free)

    @property
    def idle(self) -> int:
        """Number of blocks that only the prefix cache holds."""
        return self._idle

    @property
    def used(self) -> int:
        """Number of blocks that live sequences hold."""
        return self.total - self.free - self._idle - self._copied

    def take(self, count: int) -> list[int]:
        """Hands out free blocks with one reference each.

        Raises:
            IntegrityError: fewer are free; callers check ``free`` first.
        """
        if count > len(self._free):
            raise IntegrityError(f"{count} blocks are requested, {len(self._free)} are free")
        if count == 0:
            return []
        taken = self._free[-count:][::-1]
        del self._free[-count:]
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a sequence's reference to blocks that are held already."""
        for block in blocks:
            if self._references[block] < 1:
                raise IntegrityError(f"block {block} is shared, but nobody holds it")
            if self._cached[block] == self._references[block]:
                self._idle -= 1
            elif self._only_copied(block):
                self._copied -= 1
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drops a sequence's references; blocks without any are free again."""
        for block in blocks:
            left = self._references[block] - 1
            if left < self._cached[block] + self._copies.get(block, 0):
                raise IntegrityError(f"block {block} is released by a sequence that does not hold it")
            self._references[block] = left
            if left == 0:
                self._free.append(block)
            elif left == self._cached[block]:
                self._idle += 1
            elif self._only_copied(block):
                self._copied += 1

    def hold_for_copy(self, blocks: Iterable[int]) -> None:
        """Adds the reference of a copy to blocks that somebody holds."""
        for block in blocks:
            if self._references[block] < 1:
                raise IntegrityError(f"block {block} is copied, but nobody holds it")
            if self._cached[block] == self._references[block]:
                self._idle -= 1
                self._copied += 1
            self._references[block] += 1
            self._copies[block] = self._copies.get(block, 0) + 1

    def release_copy(self, blocks: Iterable[int]) -> None:
        """Drops the reference of a copy."""
        for block in blocks:
            copies = self._copies.get(block, 0)
            if not copies:
                raise IntegrityError(f"block {block} is released by a copy that does not hold it")
            if copies == 1:
                if self._only_copied(block):
                    self._copied -= 1
                del self._copies[block]
            else:
                self._copies[block] = copies - 1
            left = self._references[block] = self._references[block] - 1
            if left == 0:
                self._free.append(block)
            elif left == self._cached[block]:
                self._idle += 1

    def _only_copied(self, block: int) -> bool:
        copies = self._copies.get(block, 0)
        return copies > 0 and self._references[block] == self._cached[block] + copies

    def cache(self, block: int) -> None:
        """Adds a reference of the prefix cache to a block that somebody holds."""
        if self._references[block] < 1:
            raise IntegrityError(f"block {block} cannot be cached: nobody holds it")
        self._references[block] += 1
        self._cached[block] += 1

    def uncache(self, block: int) -> None:
        """Drops a reference of the prefix cache."""
        if not self._cached[block]:
            raise IntegrityError(f"block {block} is not cached")
        self._cached[block] -= 1
        self._references[block] -= 1
        if self._references[block] == 0:
            self._idle -= 1
            self._free.append(block)

    def check(self, held: Iterable[int], cached: Iterable[int], copied: Iterable[int] = ()) -> None:
        """Compares the counts with what the holders say they hold.

        Args:
            held: every block of every live sequence, once for each sequence that holds it.
            cached: every block of every node of the prefix cache.
            copied: every block of every copy in progress.

        Raises:
            IntegrityError: a block is leaked, lost or counted wrongly.
        """
        expected = [0] * len(self._references)
        for block in held:
            expected[block] += 1
        in_cache = [0] * len(self._references)
        for block in cached:
            in_cache[block] += 1
            expected[block] += 1
        copies: dict[int, int] = {}
        for block in copied:
            copies[block] = copies.get(block, 0) + 1
            expected[block] += 1
        only = sum(1 for block, count in copies.items() if expected[block] == in_cache[block] + count)
        if copies != self._copies or only != self._copied:
            raise IntegrityError(f"copies should hold {len(self._copies)} blocks, but hold {len(copies)}")
        if expected[0]:
            raise IntegrityError("scratch block 0 is in use")
        if expected != self._references or in_cache != self._cached:
            wrong = [
                block
                for block, count in enumerate(expected)
                if count != self._references[block] or in_cache[block] != self._cached[block]
            ]
            raise IntegrityError(f"references of blocks {wrong[:8]} differ from what sequences and cache hold")
        free = [block for block, count in enumerate(expected) if count == 0 and block]
        if sorted(self._free) != free:
            raise IntegrityError(f"the free list has {len(self._free)} blocks, {len(free)} are unreferenced")
        idle = sum(1 for block, count in enumerate(expected) if count and count == in_cache[block])
        if idle != self._idle:
            raise IntegrityError(f"{self._idle} blocks are counted as idle, {idle} are")
