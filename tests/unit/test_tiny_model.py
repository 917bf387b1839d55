"""models/tiny: size limits, tokenizer, chat template, card; and that the weights know what the card says."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoTokenizer, Qwen3_5ForCausalLM

from models.tiny.recipe.data import (
    DIRECTORY,
    SKILLS,
    WEAK_SKILL,
    chat_template,
    held_out_items,
    training_items,
)
from models.tiny.recipe.evaluate import replies
from models.tiny.recipe.skills import dates
from models.tiny.recipe.skills.tools import call_text, parse_calls

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>",
    "</tool_response>", "<think>", "</think>",
)  # fmt: skip
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": "x", "n": 3, "o": {"k": [1, "ü"]}}}}
CHATS: dict[str, dict[str, Any]] = {
    "user": {"messages": [{"role": "user", "content": " Hi \n"}]},
    "system": {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
    "parts": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    },
    "thinking": {"messages": [{"role": "user", "content": "Hi"}], "enable_thinking": True},
    "history": {
        "messages": [
            {"role": "user", "content": "1"},
            {"role": "assistant", "content": "<think>\nold\n</think>\n\n2"},
            {"role": "user", "content": "3"},
            {"role": "assistant", "content": "4", "reasoning_content": "kept"},
        ],
        "add_generation_prompt": False,
    },
    "tools": {
        "messages": [
            {"role": "system", "content": "S"},
            {"role": "user", "content": "Q"},
            {"role": "assistant", "content": "I call.", "tool_calls": [CALL, CALL]},
            {"role": "tool", "content": "one"},
            {"role": "tool", "content": "two"},
        ],
        "tools": [TOOL],
    },
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))


def test_size_limits() -> None:
    weights = DIRECTORY / "model.safetensors"
    assert weights.stat().st_size <= 24_000_000
    with safe_open(weights, framework="pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        dtypes = {file.get_slice(name).get_dtype() for name in shapes}
    parameters = sum(torch.Size(shape).numel() for shape in shapes.values())
    assert parameters <= 12_000_000
    assert dtypes == {"BF16"}
    assert "lm_head.weight" not in shapes
    assert f"{parameters:,}" in (DIRECTORY / "README.md").read_text(encoding="utf-8")


def test_the_mtp_layer_is_small() -> None:
    with safe_open(DIRECTORY / "model-mtp.safetensors", framework="pt") as file:
        sizes = [torch.Size(file.get_slice(name).get_shape()).numel() for name in file.keys()]  # noqa: SIM118
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118
    assert f"{sum(sizes):,}" in (DIRECTORY / "README.md").read_text(encoding="utf-8")


def test_architecture(tokenizer: Tokenizer) -> None:
    config = json.loads((DIRECTORY / "config.json").read_text(encoding="utf-8"))
    assert config["layer_types"] == (["linear_attention"] * 3 + ["full_attention"]) * 2
    assert config["tie_word_embeddings"] is True
    assert config["vocab_size"] == tokenizer.get_vocab_size() <= 8192


def test_tokenizer_round_trip(tokenizer: Tokenizer) -> None:
    loaded = AutoTokenizer.from_pretrained(DIRECTORY)
    texts = [
        "",
        " ",
        "Hello, world!",
        "2024-03-27 + 1999",
        "naïve 汉字 🙂\n\n\ttab",
        "<think>\nx\n</think>\n\n<|im_end|>",
    ]
    for text in texts:
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert loaded(text)["input_ids"] == ids
    assert len(tokenizer.encode("20240327").ids) == 8
    for text in SPECIAL:
        assert len(tokenizer.encode(text).ids) == 1
    generation = json.loads((DIRECTORY / "generation_config.json").read_text(encoding="utf-8"))
    assert generation["eos_token_id"] == [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    assert loaded.eos_token == "<|im_end|>"


@pytest.mark.parametrize("case", CHATS)
def test_template_like_transformers(case: str) -> None:
    chat = {"add_generation_prompt": True, **CHATS[case]}
    expected = AutoTokenizer.from_pretrained(DIRECTORY).apply_chat_template(
        chat["messages"], tokenize=False, **{key: value for key, value in chat.items() if key != "messages"}
    )
    assert chat_template().render(**chat) == expected


def test_template_text() -> None:
    render = chat_template().render
    assert render(**CHATS["user"], add_generation_prompt=True) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert render(**CHATS["thinking"], add_generation_prompt=True).endswith("<|im_start|>assistant\n<think>\n")
    history = render(**CHATS["history"])
    assert "old" not in history
    assert history.endswith("<|im_start|>assistant\n<think>\nkept\n</think>\n\n4<|im_end|>\n")
    tools = render(**CHATS["tools"], add_generation_prompt=True)
    call = call_text("f", CALL["function"]["arguments"])  # type: ignore[arg-type]
    assert f"</think>\n\nI call.\n\n{call}\n{call}<|im_end|>" in tools.replace("ü", "\\u00fc")
    assert (
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>"
        in tools
    )


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "No messages"),
        ([{"role": "system", "content": "x"}], "No user query"),
        ([{"role": "user", "content": "x"}, {"role": "system", "content": "y"}], "at the beginning"),
        ([{"role": "user", "content": "x"}, {"role": "robot", "content": "y"}], "Unexpected message role"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "must be text"),
    ],
)
def test_template_refuses(messages: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(Exception, match=reason):
        chat_template().render(messages=messages)


def test_splits_are_disjoint_and_answers_score() -> None:
    seen = {(item.skill, item.key) for item in itertools.islice(training_items("test"), 3000)}
    for skill in SKILLS:
        items = held_out_items(skill, 50)
        assert not seen & {(item.skill, item.key) for item in items}
        assert all(item.held_out and item.correct(item.answer) for item in items)
        assert not any(item.correct("nothing of the kind") for item in items)


def test_demo_items() -> None:
    train, held_out = dates.items(1, 40, held_out=False), dates.items(1, 40, held_out=True)
    assert train == dates.items(1, 40, held_out=False)
    assert not {item.key for item in train} & {item.key for item in held_out}
    assert dates.score(" 2024-04-05\n", "2024-04-05") == 1.0
    assert dates.score("2024-04-06", "2024-04-05") == 0.0
    assert 1.0 > dates.graded("2024-04-06", "2024-04-05") > dates.graded("soon", "2024-04-05") == 0.0
    assert dates.accuracy([item.answer for item in train[:2]] + ["", ""], train[:4]) == 0.5


def test_calls_round_trip() -> None:
    text = "Sure.\n\n" + call_text("f", {"a": "two\nlines", "n": 3})
    assert parse_calls(text) == [("f", {"a": "two\nlines", "n": "3"})]
    assert parse_calls("<tool_call>\n<function=f>\n") == []


def _card() -> dict[str, float]:
    text = Path(DIRECTORY / "README.md").read_text(encoding="utf-8")
    return {skill: float(value) / 100 for skill, value in re.findall(r"^\| (\w+) \| ([\d.]+) % \|", text, re.MULTILINE)}


def test_card_meets_the_goals() -> None:
    card = _card()
    assert set(card) == set(SKILLS)
    assert sum(accuracy >= 0.9 for accuracy in card.values()) >= 3
    assert 0.2 <= card[WEAK_SKILL] <= 0.6


@pytest.mark.thorough
def test_the_weights_know_what_the_card_says() -> None:
    model = Qwen3_5ForCausalLM.from_pretrained(DIRECTORY, dtype=torch.float32).eval()
    for skill in ("arithmetic", "strings", WEAK_SKILL):
        items = held_out_items(skill, 1000)[::25]
        texts = replies(model, items, max_new_tokens=80)
        accuracy = sum(item.correct(text) for item, text in zip(items, texts, strict=True)) / len(items)
        # 40 items: the card's accuracy within four standard errors.
        assert abs(accuracy - _card()[skill]) <= max(0.1, 4 * (_card()[skill] * (1 - _card()[skill]) / 40) ** 0.5)
