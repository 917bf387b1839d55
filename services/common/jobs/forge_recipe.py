"""Recipe of a forge run: a YAML file that names a model, data and suites of this machine."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BeforeValidator, ConfigDict, Field, ValidationError

from services.common.errors import InvalidRequest
from services.common.jobs.fields.gates import MAX_SUITES
from services.common.jobs.kinds.forge import ForgeSettings
from services.common.validation.errors import problem

_STORE = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])/(?P<prefix>[^?#]*[^?#/])/?")
_MOST_BYTES = 2**20
_FilePath = Annotated[Path, BeforeValidator(lambda value: Path(value) if isinstance(value, str) else value)]


class Recipe(ForgeSettings):
    """A forge run on this machine. Relative paths start at the recipe's directory."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    model: _FilePath
    """Directory of the checkpoint."""
    output: str = Field(min_length=1)
    """Directory that becomes the smaller checkpoint, or s3://bucket/prefix."""
    data: _FilePath | None = None
    """JSONL of examples as SFT takes them: importance is measured on them, and recovery learns from them."""
    data_name: str | None = Field(None, max_length=200)
    """What the data is called in records; None: the file's name."""
    held_out: _FilePath | None = None
    """JSONL of held-out examples of recovery."""
    suites: list[_FilePath] = Field(default_factory=list, max_length=MAX_SUITES)
    """Suites that the model is evaluated on before and after: {suite}.jsonl with items, and {suite}.json with the
    scorer and other settings beside it."""
    sign: _FilePath | None = None
    """Ed25519 private key (PEM) that the record is signed with."""

    @property
    def bucket_and_prefix(self) -> tuple[str, str] | None:
        """Place of the output in an object store; None: it is a directory."""
        match = _STORE.fullmatch(self.output)
        return None if match is None else (match["bucket"], match["prefix"])

    @property
    def settings(self) -> ForgeSettings:
        """What the run does, without the files of this machine."""
        return ForgeSettings.model_validate({name: getattr(self, name) for name in ForgeSettings.model_fields})

    def at(self, directory: Path) -> Recipe:
        """The recipe with its paths behind a directory, where they are relative."""
        changes: dict[str, Any] = {"suites": [directory / suite for suite in self.suites]}
        for name in ("model", "data", "held_out", "sign"):
            if (path := getattr(self, name)) is not None:
                changes[name] = directory / path
        if self.bucket_and_prefix is None:
            changes["output"] = os.path.normpath(directory / self.output)
        return self.model_copy(update=changes)


def read_mapping(file: Path) -> dict[str, Any]:
    """Mapping from a YAML file.

    Raises:
        InvalidRequest: the file cannot be read, or is no YAML.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
        if len(text) > _MOST_BYTES:
            raise InvalidRequest(f"{file} is over 1 MiB: a recipe names files of data, it does not hold them")
        content = yaml.safe_load(text)
    except OSError as error:
        raise InvalidRequest(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{file} is not UTF-8 text: save it as UTF-8") from error
    except yaml.YAMLError as error:
        raise InvalidRequest(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise InvalidRequest(f"{file}: a recipe is a YAML mapping, with prune in it")
    return content


def read_recipe(file: Path) -> Recipe:
    """Recipe from a YAML file, its paths made absolute or relative to the working directory.

    Raises:
        InvalidRequest: the file cannot be read, is no YAML, or a field is wrong; names the field and what is possible.
    """
    content = read_mapping(file)
    try:
        recipe = Recipe.model_validate(content)
    except ValidationError as error:
        raise InvalidRequest(f"{file}: {problem(error, Recipe, content)}") from error
    place = recipe.bucket_and_prefix
    unclear = place is not None and not {"", ".", ".."}.isdisjoint(place[1].split("/"))
    if recipe.output.startswith("s3:") and (place is None or unclear):
        raise InvalidRequest(f"{file}: output {recipe.output!r} must be s3://bucket/prefix, or a directory")
    if recipe.reads_data and recipe.data is None:
        what = (
            "recover learns" if recipe.recover is not None else f"importance by {recipe.importance.method} is measured"
        )
        raise InvalidRequest(
            f"{file}: {what} on data: name a JSONL file of examples as data, or take importance.method weights and no "
            "recover",
            param="data",
        )
    return recipe.at(file.parent)
