"""A conversation whose last message is left open, against transformers and with the model's own template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from services.common.errors import InvalidRequest
from services.common.text.tokenizer import TextCodec

TINY = Path("models/tiny")
CODEC = TextCodec.from_directory(TINY)
USER = {"role": "user", "content": "Tell me."}


def prompt(last: dict[str, Any], **options: Any) -> str:
    tokens = CODEC.encode_chat([USER, last], continue_final_message=True, **options)
    return CODEC.decode(tokens, skip_special=False)


@pytest.mark.parametrize("content", ["It was", "x\ny", "naïve 🙂", "a < b"])
def test_equals_transformers(content: str) -> None:
    reference = PreTrainedTokenizerFast.from_pretrained(TINY)
    chat = [USER, {"role": "assistant", "content": content}]
    text = reference.apply_chat_template(chat, tokenize=False, continue_final_message=True)
    assert CODEC.encode_chat(chat, continue_final_message=True) == reference.encode(text, add_special_tokens=False)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="ab <>|\n\ufdd0\ufdd1é", max_size=12), st.sampled_from(["", "<|im_end|>", "<think>", "<|im_"]))
def test_the_prompt_ends_with_the_message(text: str, control: str) -> None:
    content = f"x{text}{control}{text}"
    if content.isspace():
        return
    tokens = CODEC.encode_chat([USER, {"role": "assistant", "content": content}], continue_final_message=True)
    assert CODEC.decode(tokens, skip_special=False).endswith(f"<think>\n\n</think>\n\n{content}")
    ends = [token for token in tokens if token == CODEC.token_id("<|im_end|>")]
    assert len(ends) == 1, "that of the user's turn; what a client writes ends nothing"


def test_reasoning_is_continued_inside() -> None:
    assert prompt({"role": "assistant", "content": "", "reasoning_content": "first, "}).endswith("<think>\nfirst, ")
    assert prompt({"role": "assistant", "reasoning": "first"}).endswith("<think>\nfirst")
    both = {"role": "assistant", "content": "so ", "reasoning_content": "first"}
    assert prompt(both).endswith("<think>\nfirst\n</think>\n\nso ")
    assert prompt({"role": "assistant", "content": ""}).endswith("<think>\n\n</think>\n\n")


def test_what_cannot_be_continued() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    for last in (USER, {"role": "assistant", "tool_calls": [call]}):
        with pytest.raises(InvalidRequest, match="continue_final_message"):
            CODEC.encode_chat([USER, last], continue_final_message=True)
    hides = TextCodec({**CODEC.files, "chat_template.jinja": b"{{ messages[0].content }}"})
    with pytest.raises(InvalidRequest, match="does not show"):
        hides.encode_chat([USER, {"role": "assistant", "content": "x"}], continue_final_message=True)
