"""Permutations that every process draws alike, with torch or without.

They are those of `torch.randperm` on the CPU (a Fisher-Yates shuffle on a Mersenne twister, seeded by init_genrand of
Matsumoto and Nishimura): a gateway has no torch, and what jobs of earlier releases held out stays what they hold out.
"""

from __future__ import annotations

import random

_WORDS = 624
_MASK = 0xFFFFFFFF


def permutation(count: int, seed: int) -> list[int]:
    """The numbers below ``count`` in an order that depends on the seed only."""
    draw = _twister(seed)
    order = list(range(count))
    for at in range(count - 1):
        other = at + draw.getrandbits(32) % (count - at)
        order[at], order[other] = order[other], order[at]
    return order


def _twister(seed: int) -> random.Random:
    word = seed & _MASK
    words = [word]
    for index in range(1, _WORDS):
        word = (1812433253 * (word ^ (word >> 30)) + index) & _MASK
        words.append(word)
    twister = random.Random()
    twister.setstate((3, (*words, _WORDS), None))
    return twister
