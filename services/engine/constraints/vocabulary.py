"""Vocabulary for llguidance (one trie of the model's tokens for all grammars of an engine), and masks over it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from services.common.errors import CheckpointRejected
from services.common.text.tokenizer import TextCodec
from services.engine.constraints.schema.probe import Probe

Bits = npt.NDArray[np.int32]
"""Mask, [words] int32: bit ``t % 32`` of word ``t // 32`` tells whether token ``t`` is allowed."""
NO_FORCING = '%llguidance {"no_forcing": true}\n'
"""First line of every grammar. Without it llguidance tokenizes text that must follow with the checkpoint's tokenizer,
which reads `<|im_end|>` in it as the control token: a schema's constant could then end the answer half-way."""
_MOST_THREADS = 8
_NEWLINES = "start: /\\n{1,4}/"


def allow(row: Bits, tokens: Iterable[int]) -> None:
    """Sets the bits of some tokens."""
    unsigned = row.view(np.uint32)
    for token in tokens:
        unsigned[token >> 5] |= np.uint32(1 << (token & 31))


def forbid(row: Bits, tokens: Iterable[int]) -> None:
    """Clears the bits of some tokens."""
    unsigned = row.view(np.uint32)
    for token in tokens:
        unsigned[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)


def allows(row: Bits, token: int) -> bool:
    """True if a token's bit is set."""
    return bool((int(row[token >> 5]) >> (token & 31)) & 1)


def tokens_of(row: Bits) -> list[int]:
    """All tokens whose bit is set, ascending."""
    found: list[int] = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
    return found


class Vocabulary:
    """Vocabulary of the model. Immutable; used by many threads.

    A grammar's text consists of ordinary tokens only. Added tokens (`<|im_end|>`, `<tool_call>`) are not text: a Lark
    grammar names those that it wants, and only ones that are not marked special.

    Args:
        codec: has the checkpoint's tokenizer.json.
        size: width of the model's logits; ids that the tokenizer does not know are never allowed.
        threads: threads that make the masks of a step; 0: half of this process's cores, at most 8.

    Raises:
        CheckpointRejected: llguidance cannot read the tokenizer.
    """

    def __init__(self, codec: TextCodec, size: int, threads: int = 0) -> None:
        try:
            self.tokenizer = LLTokenizer(
                codec.files["tokenizer.json"].decode(), n_vocab=size, eos_token=list(codec.eos_ids), slices=None
            )
        except ValueError as error:
            raise CheckpointRejected(f"tokenizer.json: grammars cannot be compiled for it: {error}") from error
        if self.tokenizer.vocab_size != size:
            raise CheckpointRejected(
                f"tokenizer.json: {self.tokenizer.vocab_size} tokens, the model's logits are {size} wide"
            )
        self.size = size
        self.words = -(-size // 32)
        self.eos_ids = frozenset(codec.eos_ids)
        self.reserved = {
            name: token for name, token in codec.added_ids.items() if token in codec.special_ids | self.eos_ids
        }
        """Added tokens that no grammar may name."""
        self._executor = LLExecutor(threads or max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // 2)))
        self.nameable = ~self.bits(set(self.reserved.values()) - self.eos_ids)
        """Mask of all tokens but the reserved ones; those that end an answer are let through."""
        self.probe = Probe()
        """Probe by which schemas are compiled."""
        self.newlines = self._newlines()
        """Mask of the tokens that are newlines and nothing else."""

    def bits(self, tokens: Iterable[int]) -> Bits:
        """Mask of these tokens alone."""
        row = np.zeros(self.words, dtype=np.int32)
        allow(row, tokens)
        return row

    def fill(self, matchers: Sequence[tuple[LLMatcher, int]], masks: npt.NDArray[np.int32]) -> None:
        """Writes the mask of each matcher to its row, on several threads and without the GIL.

        A matcher that fails is in its error state afterwards, and its row means nothing.
        """
        if len(matchers) == 1:
            matcher, row = matchers[0]
            fill_next_token_bitmask(matcher, masks, row)
        elif matchers:
            fill_next_token_bitmask_par(self._executor, list(matchers), masks)

    def _newlines(self) -> Bits:
        masks = np.zeros((1, self.words), dtype=np.int32)
        matcher = LLMatcher(self.tokenizer, NO_FORCING + _NEWLINES, log_level=0)
        fill_next_token_bitmask(matcher, masks, 0)
        if matcher.is_error():
            raise CheckpointRejected(f"tokenizer.json: masks cannot be made for it: {matcher.get_error()}")
        newlines: Bits = masks[0]
        return newlines
