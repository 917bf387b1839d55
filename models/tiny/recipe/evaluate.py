"""Held-out accuracy per skill by greedy decoding: `python -m models.tiny.recipe.evaluate [--model DIR] [--count 400]`.

Decodes with transformers in float32. Prompts of similar length share a batch, padded on the left: transformers zeroes
padded positions before the convolution and masks them in attention, so the padding changes nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, Qwen3_5ForCausalLM

from models.tiny.recipe.data import DIRECTORY, END, SKILLS, chat_template, held_out_items, prompt_text
from models.tiny.recipe.item import Item


def replies(
    model: Qwen3_5ForCausalLM,
    items: Sequence[Item],
    *,
    temperature: float = 0.0,
    max_new_tokens: int = 120,
    batch: int = 128,
) -> list[str]:
    """The model's answers to the items, in their order; temperature 0 is greedy."""
    tokenizer, template = Tokenizer.from_file(str(DIRECTORY / "tokenizer.json")), chat_template()
    end = tokenizer.token_to_id(END)
    prompts = [tokenizer.encode(prompt_text(item, template)).ids for item in items]
    order = sorted(range(len(items)), key=lambda index: len(prompts[index]))
    texts = [""] * len(items)
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        width = max(len(prompts[index]) for index in chosen)
        tokens = torch.full((len(chosen), width), end, device=model.device)
        mask = torch.zeros_like(tokens)
        for row, index in enumerate(chosen):
            tokens[row, width - len(prompts[index]) :] = torch.tensor(prompts[index])
            mask[row, width - len(prompts[index]) :] = 1
        settings = GenerationConfig(max_new_tokens=max_new_tokens, eos_token_id=end, pad_token_id=end)
        if temperature > 0:
            settings.update(do_sample=True, temperature=temperature, top_k=0)
        with torch.inference_mode():
            output = model.generate(tokens, attention_mask=mask, generation_config=settings)
        for index, written in zip(chosen, output[:, width:].tolist(), strict=True):
            kept = written[: written.index(end)] if end in written else written
            texts[index] = tokenizer.decode(kept, skip_special_tokens=False)
    return texts


def evaluate(model: Qwen3_5ForCausalLM, count: int, *, seed: int = 0, errors: int = 0) -> dict[str, dict[str, Any]]:
    """Skill → accuracy, number of held-out items and up to ``errors`` wrong answers."""
    report: dict[str, dict[str, Any]] = {}
    for skill in SKILLS:
        items = held_out_items(skill, count, seed=seed)
        wrong = [
            f"{item.messages[-1]['content']!r} -> {text!r}, not {item.answer!r}"
            for item, text in zip(items, replies(model, items), strict=True)
            if not item.correct(text)
        ]
        report[skill] = {"accuracy": round(1 - len(wrong) / len(items), 4), "items": len(items)}
        if errors:
            report[skill]["wrong"] = wrong[:errors]
    return report


def main() -> None:
    """Prints the report as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DIRECTORY)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--errors", type=int, default=0, help="wrong answers to show a skill")
    options = parser.parse_args()
    model = Qwen3_5ForCausalLM.from_pretrained(options.model, dtype=torch.float32).to(options.device).eval()
    report = evaluate(model, options.count, errors=options.errors)
    sys.stdout.write(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
