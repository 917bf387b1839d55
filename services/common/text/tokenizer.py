"""Text to tokens and back, from the checkpoint's own tokenizer files. No torch, no transformers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from services.common.errors import CheckpointRejected, InvalidRequest
from services.common.text.control import ControlTokens, Piece, free_marker
from services.common.text.instructions import placed
from services.common.text.template import ChatTemplate, absent, cut_at, normalize_messages

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
"""Files that a codec is built from; only the first must exist."""

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_LONG_CHARS = 4096


def _byte_of_character() -> dict[str, int]:
    """The printable characters that byte-level BPE writes for bytes (GPT-2's encoder.py, bytes_to_unicode)."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + index): byte for index, byte in enumerate(moved)}


class TextCodec:
    """A tokenizer with its chat template. Immutable and thread-safe.

    Equal to transformers' `apply_chat_template` and tokenizer for text without control tokens. Control tokens
    (every added token of the tokenizer: `<|im_end|>`, `<think>`, `<tool_call>`, …) in text from clients are encoded as
    plain text, see control.py. An assistant turn may contain the markup that models write themselves (added tokens
    that are not marked special: `<think>`, `<tool_call>`), but no special token.

    Args:
        files: tokenizer.json and, where they exist, tokenizer_config.json, chat_template.jinja,
            generation_config.json. Other files are ignored.

    Raises:
        CheckpointRejected: a file is missing or malformed.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = {name: files[name] for name in TOKENIZER_FILES if name in files}
        if "tokenizer.json" not in self._files:
            raise CheckpointRejected("the checkpoint has no tokenizer.json: Temper needs a fast tokenizer")
        try:
            self._tokenizer: tokenizers.Tokenizer = tokenizers.Tokenizer.from_buffer(self._files["tokenizer.json"])
        except Exception as error:  # the tokenizers package raises plain Exception
            raise CheckpointRejected(f"tokenizer.json is malformed: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = self._json("tokenizer_config.json")
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token for token, entry in added.items() if entry.special)
        self._all_control = ControlTokens([entry.content for entry in added.values()])
        self._special_control = ControlTokens([entry.content for entry in added.values() if entry.special])
        self._added_ids = {entry.content: token for token, entry in added.items()}
        self._byte_of_character = _byte_of_character()
        names = {name: _content(config[name]) for name in _SPECIAL_NAMES if config.get(name)}
        self._eos_ids = self._find_eos(names)
        self._source = self._template_source(config)
        self._template = ChatTemplate(self._source, names) if self._source is not None else None
        self._turn_start_id = self._find_turn_start()
        self._digest = hashlib.sha256(
            b"".join(hashlib.sha256(name.encode() + b"\0" + data).digest() for name, data in self._files.items())
        ).hexdigest()

    @classmethod
    def from_directory(cls, path: str | Path) -> TextCodec:
        """Reads a checkpoint directory.

        Raises:
            CheckpointRejected: a file is missing, unreadable or malformed.
        """
        directory = Path(path)
        try:
            return cls(
                {name: (directory / name).read_bytes() for name in TOKENIZER_FILES if (directory / name).exists()}
            )
        except OSError as error:
            raise CheckpointRejected(f"cannot read the tokenizer files of {directory}: {error}") from error

    # -- facts

    @property
    def files(self) -> Mapping[str, bytes]:
        """The files this codec was built from."""
        return self._files

    @property
    def config(self) -> Mapping[str, Any]:
        """tokenizer_config.json, with the chat template wherever the checkpoint has it."""
        return self._json("tokenizer_config.json") | {"chat_template": self._source}

    @property
    def digest(self) -> str:
        """sha256 over the files: equal digests tokenize and render equally."""
        return self._digest

    @property
    def tokenizer(self) -> tokenizers.Tokenizer:
        """The underlying tokenizer, for incremental decoding. Do not change it."""
        return self._tokenizer

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a generation; the first ends a chat turn."""
        return self._eos_ids

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that ``decode`` skips."""
        return self._special_ids

    @property
    def added_ids(self) -> Mapping[str, int]:
        """Every added token by its text, special or not: `<|im_end|>`, `</think>`, …"""
        return self._added_ids

    @property
    def turn_start_id(self) -> int | None:
        """The special token that each turn of a rendered chat begins with, as far as the chat template has one:
        `<|im_start|>`. In a chat only the template puts it there."""
        return self._turn_start_id

    @property
    def vocab_size(self) -> int:
        """Number of ids the tokenizer knows; the model's embedding may be padded to more."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def token_id(self, token: str) -> int | None:
        """The id of a token by its exact text, e.g. `</think>`."""
        found = self._tokenizer.token_to_id(token)
        return None if found is None else int(found)

    def token_name(self, token_id: int) -> str:
        """A token as it stands in the vocabulary; empty for an id the tokenizer does not know."""
        return str(self._tokenizer.id_to_token(token_id) or "")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for; empty for an id the tokenizer does not know."""
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if piece in self._added_ids:
            return piece.encode()
        if all(character in self._byte_of_character for character in piece):
            return bytes(self._byte_of_character[character] for character in piece)
        return piece.encode()

    # -- text

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Tokens of text that is used as it is: control tokens are recognised (raw prompts, rendered chats).

        Args:
            add_special_tokens: with what the tokenizer's post-processor puts around a text.
        """
        if len(text) < _LONG_CHARS:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        # Only the batch call releases the GIL: a prompt of megabytes in one thread must not stop all the others.
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def encode_plain(self, text: str) -> list[int]:
        """Tokens of text in which no control token is recognised."""
        return self._encode_marked(self._all_control.mark(text, marker := free_marker(text)), marker)

    def encode_completion(self, text: str) -> list[int]:
        """Tokens of what an assistant says: thinking and tool markup is recognised, special tokens are not."""
        return self._encode_marked(self._special_control.mark(text, marker := free_marker(text)), marker)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special))

    # -- chats

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **chat_template_kwargs: Any,
    ) -> str:
        """The conversation as text, for people to read; `encode_chat` is what a model must get.

        Raises:
            InvalidRequest: the template refuses the messages, or the checkpoint has no template.
        """
        pieces = self.chat_pieces(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **chat_template_kwargs
        )
        return "".join(piece.text for piece in pieces)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **chat_template_kwargs: Any,
    ) -> list[int]:
        """Tokens of the rendered conversation, with control tokens of the template only.

        With ``continue_final_message`` they end where the text of the last message, an assistant's, ends.

        Raises:
            InvalidRequest: the template refuses the messages, or the checkpoint has no template.
        """
        return [
            token
            for piece in self.chat_pieces(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **chat_template_kwargs,
            )
            for token in self.encode_piece(piece)
        ]

    def chat_pieces(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **chat_template_kwargs: Any,
    ) -> list[Piece]:
        """The rendered conversation in the pieces that `encode_chat` tokenizes one by one: nearly always one."""
        turns = placed(normalize_messages(messages))
        end = ""
        if continue_final_message:
            end = free_marker(turns, tools, chat_template_kwargs)
            turns, add_generation_prompt = absent(turns, end), False
        if not self._suspicious(turns, tools, chat_template_kwargs):
            text = self._render(
                turns, tools=tools, add_generation_prompt=add_generation_prompt, kwargs=chat_template_kwargs
            )
            return [Piece(cut_at(text, end) if end else text, plain=False)]
        marker = free_marker(turns, tools, chat_template_kwargs)
        text = self._render(
            [self._mark_turn(turn, marker) for turn in turns],
            tools=self._all_control.mark(tools, marker),
            add_generation_prompt=add_generation_prompt,
            kwargs=self._all_control.mark(chat_template_kwargs, marker),
        )
        return self._all_control.pieces(cut_at(text, end) if end else text, marker)

    def encode_piece(self, piece: Piece) -> list[int]:
        """Tokens of one piece of a rendered conversation.

        Raises:
            CheckpointRejected: the tokenizer makes a control token even from plain text.
        """
        if not piece.plain:
            return self.encode(piece.text)
        # The model alone, past the added tokens: `encode_special_tokens` would still match those not marked special.
        text = piece.text
        if self._tokenizer.normalizer is not None:
            text = self._tokenizer.normalizer.normalize_str(text)
        words = [text]
        if self._tokenizer.pre_tokenizer is not None:
            words = [word for word, _ in self._tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        ids = [int(token.id) for word in words for token in self._tokenizer.model.tokenize(word)]
        if self._added_ids.get(piece.text) in ids:
            raise CheckpointRejected(f"the tokenizer makes the control token {piece.text!r} from plain text")
        return ids

    # -- parts

    def _encode_marked(self, marked: str, marker: str) -> list[int]:
        return [token for piece in self._all_control.pieces(marked, marker) for token in self.encode_piece(piece)]

    def _suspicious(self, turns: Sequence[Mapping[str, Any]], *others: Any) -> bool:
        return any(
            (self._special_control if _is_speech(turn, key) else self._all_control).suspicious(value)
            for turn in turns
            for key, value in turn.items()
        ) or any(self._all_control.suspicious(value) for value in others)

    def _mark_turn(self, turn: Mapping[str, Any], marker: str) -> dict[str, Any]:
        return {
            key: (self._special_control if _is_speech(turn, key) else self._all_control).mark(value, marker)
            for key, value in turn.items()
        }

    def _render(
        self,
        turns: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any],
    ) -> str:
        if self._template is None:
            raise InvalidRequest(
                "the checkpoint has no chat template: use /v1/completions, or prompt_format raw", param="messages"
            )
        return self._template.render(turns, tools=tools, add_generation_prompt=add_generation_prompt, kwargs=kwargs)

    def _json(self, name: str) -> dict[str, Any]:
        try:
            value = json.loads(self._files.get(name, b"{}"))
        except ValueError as error:
            raise CheckpointRejected(f"{name} is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise CheckpointRejected(f"{name} must be a JSON object")
        return value

    def _template_source(self, config: Mapping[str, Any]) -> str | None:
        if "chat_template.jinja" in self._files:
            return self._files["chat_template.jinja"].decode()
        template = config.get("chat_template")
        if isinstance(template, list):  # the old form with several named templates
            template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
        return template

    def _find_eos(self, names: Mapping[str, str]) -> tuple[int, ...]:
        found: list[int] = []
        if "eos_token" in names:
            token = self.token_id(names["eos_token"])
            if token is None:
                raise CheckpointRejected(f"eos_token {names['eos_token']!r} is not in tokenizer.json")
            found.append(token)
        listed = self._json("generation_config.json").get("eos_token_id")
        found += [listed] if isinstance(listed, int) else listed or []
        if not found:
            raise CheckpointRejected("neither tokenizer_config.json nor generation_config.json names an eos token")
        return tuple(dict.fromkeys(found))

    def _find_turn_start(self) -> int | None:
        """First token of the turn that the model is to write, as the template begins it."""
        if self._template is None:
            return None
        asked = [{"role": "user", "content": "a"}]
        try:
            told, open_ = (
                self._render(asked, tools=None, add_generation_prompt=opens, kwargs={}) for opens in (False, True)
            )
        except InvalidRequest:  # a template that wants more than a question
            return None
        first = self.encode(open_.removeprefix(told))[:1] if open_ != told and open_.startswith(told) else []
        return first[0] if first and first[0] in self._special_ids else None


def _content(value: Any) -> str:
    """A special token is a string or an AddedToken object in tokenizer_config.json."""
    return str(value["content"]) if isinstance(value, dict) else str(value)


def _is_speech(turn: Mapping[str, Any], key: str) -> bool:
    """True if this is what the model itself said in an earlier turn, thinking and tool markup included."""
    return turn.get("role") == "assistant" and key in ("content", "reasoning_content", "thinking", "reasoning")
