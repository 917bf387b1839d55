"""Tokenizer and chat template of the model."""

from __future__ import annotations

from cli.doctor.checks.model import AGAIN
from cli.doctor.findings import Finding, NotHere, failure, ok, warning
from cli.doctor.place import Place
from services.common.errors import CheckpointRejected, TemperError
from services.common.text.tokenizer import TextCodec
from services.engine.models.registry import read_config

_TURNS = [{"role": "user", "content": "Good day"}]
_SAMPLE = "Ärger mit 12 Zeichen, 中文 and\ttabs"


def tokenizer(place: Place) -> Finding:
    """The tokenizer reads its files and gives back the text that it was given."""
    codec = _codec(place)
    if isinstance(codec, Finding):
        return codec
    ids = codec.encode_plain(_SAMPLE)
    if codec.decode(ids) != _SAMPLE:
        return warning("the tokenizer does not give back the text that it was given", AGAIN)
    try:
        most = read_config(place.model).vocab_size
    except CheckpointRejected:
        return ok(f"the tokenizer has {codec.vocab_size:,} tokens")
    if codec.vocab_size > most:
        return failure(
            f"the tokenizer has {codec.vocab_size:,} tokens, the model {most:,}: they do not belong together", AGAIN
        )
    if not codec.eos_ids:
        return warning(
            "the tokenizer names no token that ends an answer",
            "set eos_token in tokenizer_config.json, or answers go on",
        )
    return ok(f"the tokenizer has {codec.vocab_size:,} tokens of the model's {most:,}")


def template(place: Place) -> Finding:
    """The chat template renders a turn."""
    codec = _codec(place)
    if isinstance(codec, Finding):
        raise NotHere("the tokenizer cannot be read")
    if not codec.has_chat_template:
        return warning(
            "the model has no chat template, so chats are refused", "put its chat_template.jinja into the directory"
        )
    try:
        rendered = codec.render_chat(_TURNS)
    except TemperError as error:
        return failure(f"the chat template fails: {error.message}", AGAIN)
    if str(_TURNS[0]["content"]) not in rendered:
        return failure("the chat template leaves out what the user says", AGAIN)
    return ok("the chat template renders a turn")


def _codec(place: Place) -> TextCodec | Finding:
    try:
        return TextCodec.from_directory(place.model)
    except CheckpointRejected as error:
        return failure(f"the tokenizer cannot be used: {error.message}", AGAIN)
