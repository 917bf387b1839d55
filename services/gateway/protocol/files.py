"""/v1/files."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from services.gateway.core.file_store import FileInfo, Purpose


class FileObject(BaseModel):
    """A file, as OpenAI shows it."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"
    status_details: str | None = None
    sha256: str
    """Lower-case hex digest of the content."""

    @classmethod
    def of(cls, info: FileInfo) -> FileObject:
        """What a client sees of a file."""
        return cls(
            id=info.id,
            bytes=info.bytes,
            created_at=info.created_at,
            expires_at=info.expires_at,
            filename=info.filename,
            purpose=info.purpose,
            sha256=info.sha256,
        )


class FileList(BaseModel):
    """A page of files."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(BaseModel):
    """What DELETE answers."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True
