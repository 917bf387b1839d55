"""The text of a stream is the text of its tokens decoded at once, for any tokens in any groups."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from services.common.text.tokenizer import TextCodec
from services.gateway.text.detokenizer import TextAssembler, Vocabulary
from tests.unit.gateway import tokens

SAMPLES = ["naïve", "日本語", "🙂👩‍👩‍👧", "e\u0301", "\u200b", "\x00\x7f", "<think>x</think>", "a\r\nb", "\ufffd", "𝔘"]


def sequences(codec: TextCodec, count: int, seed: int) -> list[list[int]]:
    """Tokens at random, of single bytes and of added ones above all, with parts of real text between them."""
    chance = random.Random(seed)
    size = codec.vocab_size
    added = sorted(codec.tokenizer.get_added_tokens_decoder())
    single = [token for token in range(size) if len(codec.token_bytes(token)) == 1]
    high = [token for token in single if codec.token_bytes(token) >= b"\x80"]
    texts = [codec.encode(sample) for sample in SAMPLES]
    found = []
    for _ in range(count):
        sequence: list[int] = []
        for _ in range(chance.randint(1, 8)):
            match chance.randrange(6):
                case 0:
                    sequence += chance.choices(range(size), k=3)
                case 1:
                    sequence += chance.choices(high, k=4)
                case 2:
                    sequence.append(chance.choice(added))
                case 3:
                    sequence += chance.choice(texts)
                case 4:
                    whole = chance.choice(texts)
                    sequence += whole[: chance.randint(0, len(whole))]
                case 5:
                    sequence += [chance.choice(single), size + 5]  # models have more rows than tokenizers have tokens
        found.append(sequence)
    return found


@pytest.mark.parametrize(("model", "count"), [("tiny", 10_000), ("bytes", 2_000)])
def test_stream_is_the_decoded_text(model: str, count: int) -> None:
    codec = TextCodec.from_directory(Path("models/tiny")) if model == "tiny" else tokens.codec()
    vocabulary = Vocabulary(codec)
    chance = random.Random(7)
    replaced = split = 0
    for sequence in sequences(codec, count, seed=11):
        assembler = TextAssembler(vocabulary)
        pieces, entries = [], []
        position = 0
        while position < len(sequence):
            group = sequence[position : position + chance.randint(1, 5)]
            for token in group:
                assembler.push(token, position)
                position += 1
            piece = assembler.take(final=position == len(sequence))
            pieces.append(piece.text)
            entries += piece.entries
        text = codec.decode(sequence)
        assert "".join(pieces) == text, sequence
        assert entries == list(range(len(sequence)))
        replaced += "\ufffd" in text
        split += not any("\ufffd" in piece for piece in pieces) and len(text.encode()) > len(text)
    assert replaced > count // 4, "sequences with bytes that are no UTF-8"
    assert split > count // 50, "characters of several tokens that came whole"
