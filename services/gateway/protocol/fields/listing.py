"""Lists of documents, and what is told of those in them that a later release wrote."""

from __future__ import annotations

from operator import not_
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class UnreadableDocument(BaseModel):
    """A document that a later release wrote: GET of it answers 503 with this code and message."""

    id: str
    code: Literal["newer_schema"] = "newer_schema"
    message: str


class Listing(BaseModel):
    """A list of documents."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    unreadable: list[UnreadableDocument] = Field(default=[], exclude_if=not_)
    """What is left out of `data` because a later release wrote it, so that nobody knows whether it is what was asked
    for. Absent: nothing is."""
