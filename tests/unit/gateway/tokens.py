"""A tokenizer of single bytes with Qwen's special tokens, and a small chat template."""

from __future__ import annotations

import json

from services.common.text.tokenizer import TextCodec, _byte_of_character

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKUP = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
TEMPLATE = """{%- if messages[-1].role == 'assistant' and messages[-1].content == 'refuse' -%}
{{ raise_exception('this template refuses') }}{%- endif -%}
{%- if tools -%}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages -%}<|im_start|>{{ message.role }}
{% if message.reasoning_content and not loop.last %}<think>{{ message.reasoning_content }}</think>{% endif %}\
{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.arguments | tojson }}\
</tool_call>{% endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
<think>
{% if not enable_thinking %}
</think>

{% endif -%}
{%- endif -%}"""


def tokenizer_files() -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json, chat_template.jinja."""
    characters = {byte: character for character, byte in _byte_of_character().items()}
    vocab = {characters[byte]: byte for byte in range(256)}
    added = [
        {
            "id": 256 + index,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": content in SPECIAL,
        }
        for index, content in enumerate(SPECIAL + MARKUP)
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": False},
    }
    return {
        "tokenizer.json": json.dumps(tokenizer).encode(),
        "tokenizer_config.json": json.dumps({"eos_token": "<|im_end|>"}).encode(),
        "chat_template.jinja": TEMPLATE.encode(),
    }


def codec() -> TextCodec:
    """The codec of these files."""
    return TextCodec(tokenizer_files())


EOS = 258
VOCAB_SIZE = 272
"""Padded, as real checkpoints are."""
