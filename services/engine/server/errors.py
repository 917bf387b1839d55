"""Errors over gRPC: `Error` messages inside frames, and status codes of whole calls."""

from __future__ import annotations

import grpc

from services.common import errors
from services.common.pb import engine_pb2 as pb

_KINDS: tuple[tuple[type[errors.TemperError], pb.ErrorCode.ValueType, grpc.StatusCode], ...] = (
    # Subclasses before their bases.
    (errors.ContextLengthExceeded, pb.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.DoesNotFit, pb.ERROR_CODE_DOES_NOT_FIT, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.InvalidRequest, pb.ERROR_CODE_INVALID_REQUEST, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.PayloadTooLarge, pb.ERROR_CODE_INVALID_REQUEST, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.Conflict, pb.ERROR_CODE_CONFLICT, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.Gone, pb.ERROR_CODE_GONE, grpc.StatusCode.NOT_FOUND),
    (errors.ModelNotFound, pb.ERROR_CODE_MODEL_NOT_FOUND, grpc.StatusCode.NOT_FOUND),
    (errors.NotFound, pb.ERROR_CODE_NOT_FOUND, grpc.StatusCode.NOT_FOUND),
    (errors.AdapterRejected, pb.ERROR_CODE_ADAPTER_REJECTED, grpc.StatusCode.FAILED_PRECONDITION),
    # Another engine may be newer: the gateway asks it.
    (errors.NewerSchema, pb.ERROR_CODE_UNAVAILABLE, grpc.StatusCode.UNAVAILABLE),
    (errors.Overloaded, pb.ERROR_CODE_OVERLOADED, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.Unavailable, pb.ERROR_CODE_UNAVAILABLE, grpc.StatusCode.UNAVAILABLE),
    (errors.DeadlineExceeded, pb.ERROR_CODE_DEADLINE_EXCEEDED, grpc.StatusCode.DEADLINE_EXCEEDED),
)


def _told(error: BaseException) -> BaseException:
    """What a client is told of an error: a process that gets no memory, thread or file handle is busy."""
    if not errors.nothing_left(error):
        return error
    return errors.Overloaded("the engine has no memory, thread or file handle left for this request: try again shortly")


def error_code(error: BaseException) -> pb.ErrorCode.ValueType:
    """Wire code of an error; a bug is internal."""
    error = _told(error)
    return next((code for kind, code, _ in _KINDS if isinstance(error, kind)), pb.ERROR_CODE_INTERNAL)


def status_code(error: BaseException) -> grpc.StatusCode:
    """gRPC status of an error that ends a whole call."""
    error = _told(error)
    return next((status for kind, _, status in _KINDS if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


def to_message(error: BaseException) -> pb.Error:
    """Error message for a frame."""
    told = _told(error)
    if isinstance(told, errors.TemperError):
        exhausted = told is not error
        return pb.Error(code=error_code(told), message=told.message, param=told.param or "", exhausted=exhausted)
    return pb.Error(code=pb.ERROR_CODE_INTERNAL, message=errors.ENGINE_FAULT)
