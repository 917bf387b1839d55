"""The exceptions that mean something to a user of Temper.

Each class is one outcome with a stable ``code``; services map the tree to HTTP (gateway/errors.py) and to gRPC
(engine/errors.py) in one place each. Anything that is not a TemperError is a bug and is reported as `internal_error`.
"""

from __future__ import annotations

import errno
from typing import ClassVar, Final

_NOTHING_LEFT = frozenset({errno.ENOMEM, errno.EMFILE, errno.ENFILE})
_NO_THREAD = "can't start new thread"
"""How CPython's threading says that the system gives none."""


ENGINE_FAULT: Final = "the engine failed on this request; its log has the details"
"""What an engine says of a bug, without details. A call that ends as INTERNAL without it was broken on its way."""


class TemperError(Exception):
    """An outcome that the caller can understand and act on.

    Args:
        message: names the field, the limit and the way out.
        param: the request field at fault, if one is.
    """

    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(TemperError):
    """The request can never succeed as it is."""

    code = "invalid_request"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and requested tokens do not fit the model's context."""

    code = "context_length_exceeded"


class PayloadTooLarge(TemperError):
    """The request body is over the limit."""

    code = "payload_too_large"


class Unauthorized(TemperError):
    """No API key, or one that is not valid (any more)."""

    code = "invalid_api_key"


class Forbidden(TemperError):
    """The API key is valid, but lacks the scope that the message names."""

    code = "insufficient_scope"


class ForeignPage(Forbidden):
    """A browser's request for another site's page, where no API key tells who calls."""

    code = "foreign_page"


class NotFound(TemperError):
    """Something the request names does not exist."""

    code = "not_found"


class Gone(NotFound):
    """The named object existed and does not any more; the message says what happened to it."""

    code = "gone"


class ModelNotFound(NotFound):
    """No such model, adapter or adapter version."""

    code = "model_not_found"


class Conflict(TemperError):
    """The request contradicts the present state (a moved pointer, a reused idempotency key)."""

    code = "conflict"


class InProgress(Conflict):
    """The same request is being answered just now. ``retry_after`` is in seconds."""

    code = "request_in_progress"

    def __init__(self, message: str, *, param: str | None = None, retry_after: float = 1.0) -> None:
        super().__init__(message, param=param)
        self.retry_after = retry_after


class AdapterRejected(TemperError):
    """An adapter's files are corrupt, foreign or do not bind to this base model."""

    code = "adapter_rejected"


class CheckpointRejected(TemperError):
    """A model checkpoint is incomplete, misshaped or of an unknown architecture."""

    code = "checkpoint_rejected"


class DoesNotFit(InvalidRequest):
    """A job needs more memory than the plan leaves for it; the message has the byte plan."""

    code = "does_not_fit"


class RateLimited(TemperError):
    """The caller's own limit is reached. ``retry_after`` is in seconds."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, param: str | None = None, retry_after: float = 1.0) -> None:
        super().__init__(message, param=param)
        self.retry_after = retry_after


class Overloaded(TemperError):
    """A queue is full, or a process has nothing left to work with. ``retry_after`` is in seconds."""

    code = "overloaded"

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(TemperError):
    """Something Temper depends on is away (engine, Redis, object store). ``retry_after`` is in seconds."""

    code = "unavailable"

    def __init__(self, message: str, *, retry_after: float = 5.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Refused(Unavailable):
    """Something Temper depends on is there and refuses the credentials of the settings: waiting does not help."""


class NewerSchema(TemperError):
    """A record was written by a later release; another instance may be able to read it."""

    code = "newer_schema"


class DeadlineExceeded(TemperError):
    """The request's deadline passed."""

    code = "deadline_exceeded"


def nothing_left(error: BaseException) -> bool:
    """True if the system gives this process no more memory, threads or file handles: no bug, and over in a while."""
    if isinstance(error, OSError):
        return error.errno in _NOTHING_LEFT
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and str(error) == _NO_THREAD)


def scarce(error: BaseException) -> str:
    """Name of what an error of nothing_left() lacks."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return "file handle"
    return "thread" if isinstance(error, RuntimeError) else "memory"
