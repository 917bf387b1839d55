"""Quality of prompts in float8: `python -m benchmarks.quality.rounding.prompts [--items N] [--json FILE]`.

For each choice of TEMPER_PREFILL_FLOAT8 the prompts of held-out conversations of models/tiny are computed with those
products in float8 and the rest in bfloat16, and the replies behind them in bfloat16: what decodes see of a rounded
prompt. Against all of it in float32: the mean divergence of the next token's distribution, KL(float32 ‖ choice) in
nats, the largest difference of a reply token's log-probability, the share of tokens that would be chosen alike at
temperature 0, and the perplexity. The torch forward, on any machine; it rounds as the kernels do.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.lib.environment import environment
from benchmarks.lib.in_process import only_warnings
from benchmarks.lib.random_checkpoint import TINY
from models.tiny.recipe.data import END, SKILLS, chat_template, held_out_items, prompt_text
from services.engine.models.batch import CacheBuffers, ForwardBatch
from services.engine.models.footprint import Storage
from services.engine.models.qwen3_5.model import Qwen3_5
from services.engine.models.weights.prompts import PRODUCTS, PromptProducts

_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt and its reply."""

    prompt: tuple[int, ...]
    reply: tuple[int, ...]


def conversations(count: int) -> list[Conversation]:
    """``count`` held-out items a skill."""
    tokenizer, template = Tokenizer.from_file(str(TINY / "tokenizer.json")), chat_template()
    return [
        Conversation(
            tuple(tokenizer.encode(prompt_text(item, template)).ids),
            tuple(tokenizer.encode(item.completion() + END).ids),
        )
        for skill in SKILLS
        for item in held_out_items(skill, count)
    ]


def choices(layers: int) -> list[str]:
    """All products, each kind of them, and those of either half of the layers."""
    half = layers // 2
    return ["none", "all", *PRODUCTS, f"all:0-{half - 1}", f"all:{half}-{layers - 1}"]


class Replies:
    """Replies behind prompts that are multiplied with a model's float8 copies, if it has any."""

    def __init__(self, model: Qwen3_5) -> None:
        self._prompts = model
        self._replies = Qwen3_5(model.config, replace(model.weights, prompt_rows=0))

    @torch.inference_mode()
    def logprobs(self, conversation: Conversation) -> Tensor:
        """[reply, vocab] float32: of each token of the reply, given those before it."""
        tokens = (*conversation.prompt, *conversation.reply)
        blocks = -(-len(tokens) // _BLOCK)
        cache = self._prompts.allocate_cache(1 + blocks, _BLOCK, 2)
        end = len(conversation.prompt)
        first = self._logits(self._prompts, cache, tokens[:end], 0, [end - 1])
        rest = range(len(conversation.reply) - 1)
        others = self._logits(self._replies, cache, tokens[end:-1], end, list(rest)) if rest else first[:0]
        return torch.log_softmax(torch.cat((first, others)), -1)

    @staticmethod
    def _logits(model: Qwen3_5, cache: CacheBuffers, tokens: Sequence[int], start: int, rows: Sequence[int]) -> Tensor:
        positions = torch.arange(start, start + len(tokens))
        batch = ForwardBatch(
            token_ids=torch.tensor(tokens),
            positions=positions,
            kv_slots=_BLOCK + positions,
            block_tables=torch.arange(1, 1 + -(-(start + len(tokens)) // _BLOCK))[None],
            state_slots=torch.tensor([1]),
            adapter_slots=torch.tensor([0]),
            has_adapters=False,
            num_decodes=0,
            lengths=[len(tokens)],
            starts=[start],
            logit_rows=torch.tensor(rows),
        )
        return model.logits(model.forward(batch, cache, None)).float()


@dataclass(slots=True)
class Figures:
    """Sums over the tokens of replies."""

    tokens: int = 0
    divergence: float = 0.0
    largest: float = 0.0
    alike: int = 0
    surprise: float = 0.0

    def add(self, found: Tensor, exact: Tensor, reply: Sequence[int]) -> None:
        """Takes the log-probabilities of a reply's places, [reply, vocab]."""
        chosen = torch.tensor(reply)[:, None]
        mine, truth = (values.gather(1, chosen) for values in (found, exact))
        self.tokens += len(reply)
        self.divergence += float((exact.exp() * (exact - found)).sum())
        self.largest = max(self.largest, float((mine - truth).abs().max()))
        self.alike += int((found.argmax(1) == exact.argmax(1)).sum())
        self.surprise -= float(mine.sum())

    def report(self) -> dict[str, float]:
        return {
            "mean_kl": round(self.divergence / self.tokens, 7),
            "largest_logprob_difference": round(self.largest, 4),
            "chosen_alike": round(self.alike / self.tokens, 5),
            "perplexity": round(math.exp(self.surprise / self.tokens), 5),
        }


def measure(asked: Sequence[Conversation], modes: Sequence[str]) -> dict[str, dict[str, float]]:
    """Figures of each choice, "none" being bfloat16 itself."""
    truth = Replies(Qwen3_5.from_directory(TINY, dtype="float32", device="cpu"))
    exact = [truth.logprobs(conversation) for conversation in asked]
    found: dict[str, dict[str, float]] = {}
    for mode in modes:
        storage = Storage(prompts=PromptProducts.parse(mode))
        replies = Replies(Qwen3_5.from_directory(TINY, dtype="bfloat16", device="cpu", storage=storage))
        figures = Figures()
        for conversation, expected in zip(asked, exact, strict=True):
            figures.add(replies.logprobs(conversation), expected, conversation.reply)
        found[mode] = figures.report()
        sys.stderr.write(f"{mode:20} {json.dumps(found[mode])}\n")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, default=20, help="held-out conversations a skill")
    parser.add_argument("--choices", nargs="+", help="of TEMPER_PREFILL_FLOAT8; default: each kind, each half")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    only_warnings()
    asked = conversations(options.items)
    layers = Qwen3_5.from_directory(TINY, dtype="float32", device="cpu").config.num_layers
    result: dict[str, Any] = environment() | {
        "device": "cpu",
        "model": "models/tiny",
        "layers": layers,
        "conversations": len(asked),
        "prompt_tokens": sum(len(each.prompt) for each in asked),
        "reply_tokens": sum(len(each.reply) for each in asked),
        "choices": measure(asked, options.choices or choices(layers)),
    }
    text = json.dumps(result, indent=1) + "\n"
    if options.json is not None:
        options.json.write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
