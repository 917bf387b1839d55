"""Hashes of texts, 64 bits each, the same in every process and release: of whole prompts, and of all 13 words in a row.

Texts are compared by their words: Unicode's NFKC, case folded, runs of letters and digits; punctuation and white space
do not count, and each character of a script without spaces is a word. 13 words are what Brown et al. (arXiv 2005.14165,
appendix C) compared. Hashes of grams are polynomials over the words' hashes, so that each costs two products and not a
digest.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from hashlib import blake2b

from services.common.evaluation.contamination.texts import ReadText

GRAM = 13
_WORD = re.compile(r"[^\W_]+")
_SPACELESS = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
_BITS = 2**64 - 1
_BASE = 0x9E3779B97F4A7C15
_LEAVES = pow(_BASE, GRAM, 2**64)
"""Factor of the word that leaves when the next one comes."""
_WORDS_KEPT = 2**19


def words(text: str) -> list[str]:
    """Words of a text in the form in which they are compared."""
    if text.isascii():
        return _WORD.findall(text.lower())
    folded = unicodedata.normalize("NFKC", text).casefold()
    return _WORD.findall(_SPACELESS.sub(r" \g<0> ", folded))


class _WordHashes(dict[str, int]):
    """Hash of each word, computed once; a bounded number of them is kept."""

    def __missing__(self, word: str) -> int:
        if len(self) >= _WORDS_KEPT:
            self.clear()
        found = int.from_bytes(blake2b(word.encode("utf-8", "replace"), digest_size=8).digest(), "little")
        self[word] = found
        return found


class TextHasher:
    """Hashes of texts. Not thread-safe."""

    def __init__(self) -> None:
        self._words = _WordHashes()

    def grams(self, text: ReadText) -> list[int]:
        """Hashes of all 13 words in a row, across turns; system prompts are left out, which say how to answer."""
        found = self._rolling([word for turn in text.turns if not turn.is_system for word in words(turn.text)])
        for other in text.others:
            found += self._rolling(words(other))
        return found

    def _rolling(self, spoken: Sequence[str]) -> list[int]:
        if len(spoken) < GRAM:
            return []
        values = list(map(self._words.__getitem__, spoken))
        found = 0
        for value in values[:GRAM]:
            found = (found * _BASE + value) & _BITS
        hashes = [found]
        for oldest, value in zip(values, values[GRAM:], strict=False):
            found = (found * _BASE + value - oldest * _LEAVES) & _BITS
            hashes.append(found)
        return hashes


def prompt_hashes(text: ReadText) -> set[int]:
    """Hashes of each prompt as a whole: with its system prompt, and without."""
    found: set[int] = set()
    whole, spoken = blake2b(digest_size=8), blake2b(digest_size=8)
    prompts = set(text.prompts)
    said = heard = False  # whether there are words in each
    for place, turn in enumerate(text.turns, start=1):
        line = "".join(f"{word} " for word in words(turn.text)).encode("utf-8", "replace")
        whole.update(line)
        heard = heard or bool(line)
        if not turn.is_system:
            spoken.update(line)
            said = said or bool(line)
        if place in prompts and heard:
            found.add(_number(whole.digest()))
        if place in prompts and said:
            found.add(_number(spoken.digest()))
    return found


def whole_prompt(text: ReadText) -> int | None:
    """Hash of an item's prompt with all that it says; None: it says nothing.

    Found among `prompt_hashes` of a training text whose prompt is the same; if the item has no system prompt, whatever
    system prompt that one has.
    """
    (end,) = text.prompts
    line = "".join(f"{word} " for turn in text.turns[:end] for word in words(turn.text))
    return _number(blake2b(line.encode("utf-8", "replace"), digest_size=8).digest()) if line else None


def _number(digest: bytes) -> int:
    return int.from_bytes(digest, "little")
