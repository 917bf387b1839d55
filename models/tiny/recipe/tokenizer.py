"""Trains the byte-level BPE tokenizer: `python -m models.tiny.recipe.tokenizer`."""

from __future__ import annotations

import itertools
import json

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from models.tiny.recipe.data import DIRECTORY, END, chat_template, prompt_text, training_items

VOCABULARY = 2048
CORPUS_ITEMS = 60_000
SEED = "tokenizer"

# Qwen3.5's split: words with their leading space, digits one by one.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The flag is Qwen's: control tokens vanish from decoded text, markers that a parser needs stay.
SPECIAL = {
    "<|endoftext|>": True, "<|im_start|>": True, "<|im_end|>": True, "<tool_call>": False, "</tool_call>": False,
    "<tool_response>": False, "</tool_response>": False, "<think>": False, "</think>": False,
}  # fmt: skip


def train() -> Tokenizer:
    """A tokenizer of exactly ``VOCABULARY`` entries, special tokens last, as Qwen orders them."""
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    template = chat_template()
    items = itertools.islice(training_items(SEED), CORPUS_ITEMS)
    texts = (_plain(prompt_text(item, template) + item.completion()) for item in items)
    trainer = BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(text, special=special, normalized=False) for text, special in SPECIAL.items()])
    return tokenizer


def _plain(text: str) -> str:
    for token in SPECIAL:
        text = text.replace(token, "")
    return text


def main() -> None:
    """Writes tokenizer.json and tokenizer_config.json."""
    tokenizer = train()
    tokenizer.save(str(DIRECTORY / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 131072,
        "eos_token": END,
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "bos_token": None,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "errors": "replace",
    }
    (DIRECTORY / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
