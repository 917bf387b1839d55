"""Which files make a checkpoint, and what is known of them before they are fetched."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from services.model_source.errors import SourceRejected

INDEX = "model.safetensors.index.json"
NEEDED = ("config.json", "tokenizer.json")
"""What the engine does not start without; and weights."""
_ALLOWED = frozenset(
    {
        *NEEDED,
        INDEX,
        "generation_config.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "chat_template.jinja",
        "chat_template.json",
    }
)
"""Data only. Pickles (*.bin, *.pt) can run code when they are loaded, and the engine reads none."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of the source.

    ``version`` is equal for equal contents of one name, as far as the source knows. ``checksum`` is what the bytes must
    give, if the source says it: the hub has the sha256 of what lies in its large file storage, and git's blob sha1 of
    the rest.
    """

    name: str
    size: int
    version: str
    checksum: tuple[Literal["sha256", "git-sha1"], str] | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.size < 0:
            raise ValueError(f"not a file of a checkpoint: {self.name!r}, {self.size} bytes")


class Source(Protocol):
    """Somewhere that has a checkpoint."""

    def files(self) -> list[RemoteFile]:
        """All that is there and allowed.

        Raises:
            SourceRejected: there is no such place, or it is not ours to read.
            SourceBroken: no answer.
        """

    def open(self, file: RemoteFile, offset: int) -> AbstractContextManager[tuple[int, Iterator[bytes]]]:
        """Where the bytes begin (``offset``, or 0 if the server has no ranges), and the bytes.

        Raises:
            SourceRejected, SourceBroken: as above; SourceBroken also while the bytes are read.
        """


def notes(name: str) -> tuple[str, str]:
    """Beside a file that is being fetched: its unfinished bytes, and which version of it they are."""
    return f"{name}.part", f"{name}.version"


def is_wanted(name: str) -> bool:
    """Whether a file of the source belongs to a checkpoint.

    Raises:
        SourceRejected: the name would leave the directory.
    """
    if ".." in name.split("/") or name.startswith("/") or "\\" in name or "\0" in name:
        raise SourceRejected(
            "TEMPER_MODEL_SOURCE", f"refused: it has a file called {name!r}, which is a path elsewhere"
        )
    return bool(_NAME.fullmatch(name)) and (name in _ALLOWED or name.endswith(".safetensors"))


def check_complete(files: Sequence[RemoteFile], place: str) -> None:
    """Raises SourceRejected if something is missing without which the engine does not start."""
    names = {file.name for file in files}
    missing = [name for name in NEEDED if name not in names]
    if not any(name.endswith(".safetensors") for name in names):
        missing.append("*.safetensors")
    if missing:
        there = f"it has {', '.join(sorted(names))}" if names else "nothing of a checkpoint is there"
        raise SourceRejected("TEMPER_MODEL_SOURCE", f"{place} has no {', no '.join(missing)}: {there}")


def without_strays(files: Iterable[RemoteFile], index: Path | None) -> list[RemoteFile]:
    """Files without the weights that the index does not name: some repositories have them twice, in another
    sharding."""
    if index is None:
        return list(files)
    try:
        named = {str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise SourceRejected("TEMPER_MODEL_SOURCE", f"its {INDEX} has no readable weight_map: {error!r}") from error
    kept = [file for file in files if not file.name.endswith(".safetensors") or file.name in named]
    missing = named - {file.name for file in kept}
    if missing:
        raise SourceRejected("TEMPER_MODEL_SOURCE", f"its {INDEX} names {sorted(missing)}, which is not there")
    return kept


def matches(file: RemoteFile, path: Path) -> bool:
    """Whether a fetched file has the size and the checksum that the source says."""
    if path.stat().st_size != file.size:
        return False
    if file.checksum is None:
        return True
    kind, wanted = file.checksum
    if kind == "sha256":
        digest = hashlib.sha256()
    else:
        digest = hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as handle:
        while block := handle.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest() == wanted
