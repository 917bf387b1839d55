"""Calibration data: examples in JSONL, as SFT takes them, packed without padding."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from pydantic_core import from_json

from services.common.errors import InvalidRequest
from services.common.jobs import SftExample, SftJob
from services.common.jobs.documents import Document
from services.common.jobs.kinds.sft import example_documents
from services.common.text.tokenizer import TextCodec
from services.common.validation.errors import problem
from services.trainer.packing import Microbatch, apply_limit, pack


@dataclass(frozen=True, slots=True)
class Calibration:
    """Documents that importance is measured on."""

    name: str
    sha256: str
    """Of the file."""
    documents: Sequence[Document]
    """In the file's order; losses are on what is trained in them."""

    @classmethod
    def read(
        cls,
        file: Path,
        codec: TextCodec,
        *,
        name: str | None = None,
        max_tokens: int | None = None,
        max_document_tokens: int = 4096,
    ) -> Calibration:
        """Reads the file and tokenizes it with the checkpoint's tokenizer and template.

        Args:
            name: what the data is called in records; None: the file's name.
            max_tokens: documents from the first on, until they have as many; None: all.
            max_document_tokens: a longer document is cut off behind these.

        Raises:
            InvalidRequest: the file cannot be read, or a line is no example; its number is named.
        """
        try:
            content = file.read_bytes()
            text = content.decode("utf-8-sig")
        except OSError as error:
            raise InvalidRequest(f"cannot read {file}: {error.strerror}", param="data") from error
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"{file} is not UTF-8 text", param="data") from error
        examples = [_example(file, line, row) for line, row in _rows(text)]
        if not examples:
            raise InvalidRequest(f"{file} is empty: examples are needed", param="data")
        spec = SftJob(adapter="calibration", examples=examples, overlong="truncate")
        kept: list[Document] = []
        tokens = 0
        for index, example in enumerate(examples):
            if max_tokens is not None and tokens >= max_tokens:
                break
            found = example_documents(codec, spec, example, index, field=file.name)
            kept += found
            tokens += sum(min(document.length, max_document_tokens) for document in found)
        documents, _ = apply_limit(kept, spec, max_document_tokens, field=file.name)
        return cls(name or file.name, hashlib.sha256(content).hexdigest(), documents)

    @property
    def tokens(self) -> int:
        """Tokens that a forward reads."""
        return sum(document.length - 1 for document in self.documents)

    def packed(self, max_tokens: int, device: torch.device) -> list[Microbatch]:
        """All documents in few forwards."""
        return pack(self.documents, max_tokens, device)

    def sample(self, tokens: int) -> Sequence[Document]:
        """The first documents that together have at most as many tokens; at least one."""
        chosen: list[Document] = []
        total = 0
        for document in self.documents:
            total += document.length - 1
            if chosen and total > tokens:
                break
            chosen.append(document)
        return chosen

    def record(self) -> dict[str, Any]:
        """What is said of the data beside results."""
        return {"name": self.name, "sha256": self.sha256, "documents": len(self.documents), "tokens": self.tokens}


def _rows(text: str) -> Iterator[tuple[int, str]]:
    # Lines end with a line feed and nothing else: the other line ends of Unicode may stand inside of strings.
    return ((number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip())


def _example(file: Path, line: int, row: str) -> SftExample:
    try:
        value = from_json(row, allow_inf_nan=False)
        return SftExample.model_validate(value)
    except ValidationError as error:
        raise InvalidRequest(f"{file}:{line}: {problem(error, SftExample, value)}", param="data") from error
    except ValueError as error:
        raise InvalidRequest(f"{file}:{line} is not JSON: {str(error)[:200]}", param="data") from error
