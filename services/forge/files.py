"""Files of the forge beside checkpoints: JSON objects of one format, and digests. Without torch."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.common.errors import InvalidRequest

FORMAT = 1


def read_object(path: Path, what: str) -> dict[str, Any]:
    """A JSON object of this version's format from a file.

    Args:
        what: it should be, for messages.

    Raises:
        InvalidRequest: it cannot be read, is no JSON object, or has another format.
    """
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise InvalidRequest(f"{path} is not JSON: it should be {what}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise InvalidRequest(f"{path} is not {what} of format {FORMAT}")
    return data


def file_digest(path: Path) -> str:
    """Hex sha256 of a file. Raises InvalidRequest."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from error


def write_object(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON object into a new file, whole or not at all. Raises as of write_text."""
    write_text(path, json.dumps(content, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a new file, whole or not at all.

    Raises:
        InvalidRequest: the file is there already, or the disk is full or not writable.
    """
    refuse_existing(path)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with scratch.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        scratch.rename(path)
    except OSError as error:
        raise InvalidRequest(f"cannot write {path}: {error.strerror}", param="out") from error
    finally:
        scratch.unlink(missing_ok=True)


def refuse_existing(path: Path) -> None:
    """Raises InvalidRequest if something is there."""
    if path.exists():
        raise InvalidRequest(f"{path} is there already: name another file, or remove it first", param="out")
