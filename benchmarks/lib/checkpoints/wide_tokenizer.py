"""A tokenizer as wide as that of the 4B model, for benchmarks where the real one is not at hand: byte-level BPE whose
tokens are grown from the tiny model's, so that masks are made over as many tokens, of like lengths."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

TOKENS = 248_044
"""Tokens of the 4B model's tokenizer, its added ones left out."""
_LONGEST = 14


def widen(directory: Path, tokens: int = TOKENS, seed: int = 0) -> None:
    """Grows the tokenizer of a checkpoint to so many tokens, behind which its added ones follow."""
    path = directory / "tokenizer.json"
    data: dict[str, Any] = json.loads(path.read_text())
    model = data["model"]
    known = sorted(model["vocab"], key=model["vocab"].__getitem__)
    pieces = [piece for piece in known[256:] if not piece.startswith("Ġ")]
    seen, merges, draw = set(known), list(model["merges"]), random.Random(seed)
    while len(known) < tokens:
        # Mostly on top of early ones, which are short.
        first, second = known[draw.randrange(256, min(len(known), 60_000))], draw.choice(pieces)
        if len(first) > _LONGEST or first + second in seen:
            continue
        seen.add(first + second)
        known.append(first + second)
        merges.append([first, second])
    model["vocab"] = {piece: number for number, piece in enumerate(known)}
    model["merges"] = merges
    moved = {token["id"]: tokens + place for place, token in enumerate(data["added_tokens"])}
    for token in data["added_tokens"]:
        token["id"] = moved[token["id"]]
    path.write_text(json.dumps(data))
    generation = directory / "generation_config.json"
    config: dict[str, Any] = json.loads(generation.read_text())
    config["eos_token_id"] = [moved[token] for token in config["eos_token_id"]]
    config["pad_token_id"] = moved[config["pad_token_id"]]
    generation.write_text(json.dumps(config))
