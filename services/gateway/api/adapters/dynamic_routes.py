"""vLLM's calls for adapters, /v1/load_lora_adapter and /v1/unload_lora_adapter, with its answers and errors, and what
clients ask it before."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Annotated, Any, Literal

from fastapi import Query, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel

from services.common.errors import Conflict, InvalidRequest, NotFound, TemperError
from services.gateway.api.adapters.loading import load, unload
from services.gateway.api.adapters.routes import Adapters
from services.gateway.api.base.routing import Routes
from services.gateway.auth.route_permissions import ADMIN, ANY_KEY, Permission
from services.gateway.core.errors import status_of
from services.gateway.protocol.models import LoadAdapterRequest, UnloadAdapterRequest


class DynamicError(BaseModel):
    """What went wrong, as vLLM says it; in a body that is no request, as everywhere here."""

    message: str
    type: str
    param: str | None
    code: int | str | None


class DynamicErrorBody(BaseModel):
    """Every answer that is not a success. vLLM's errors have the fields of `error` outermost, too."""

    error: DynamicError


routes = Routes("adapters", errors=DynamicErrorBody)

_TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


@routes.post("/v1/load_lora_adapter", Permission(ADMIN, audited=True), response_class=Response, responses=_TEXT)
async def load_lora_adapter(request: Request, body: LoadAdapterRequest, adapters: Adapters) -> Response:
    """Serves an adapter under a name: from a directory below TEMPER_ADAPTERS_DIR, from s3://bucket/prefix, or a version
    "name@n". It is checked by an engine, kept in the object store, and answers at every gateway."""
    request.state.audit_targets = [body.lora_name]
    work = load(adapters, body.lora_name, body.lora_path, in_place=body.load_inplace)
    return await _answered(work, f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@routes.post("/v1/unload_lora_adapter", Permission(ADMIN, audited=True), response_class=Response, responses=_TEXT)
async def unload_lora_adapter(request: Request, body: UnloadAdapterRequest, adapters: Adapters) -> Response:
    """Removes an adapter that was loaded by such a call. One with versions that were trained or uploaded is refused."""
    request.state.audit_targets = [body.lora_name]
    work = unload(adapters, body.lora_name)
    return await _answered(work, f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


@routes.get("/server_info", Permission(ANY_KEY), response_model=None)
async def server_info(
    adapters: Adapters, _format: Annotated[Literal["json"], Query(alias="config_format")] = "json"
) -> dict[str, Any]:
    """The part of vLLM's configuration that clients read of it: model, adapters, and one replica, because a loaded
    adapter answers at every engine."""
    info = adapters.engines.served.info
    return {
        "vllm_config": {
            "model_config": {"model": info.name, "dtype": f"torch.{info.dtype}", "max_model_len": info.max_model_len},
            "lora_config": {"max_lora_rank": info.max_lora_rank, "max_loras": info.adapter_slots},
            "parallel_config": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1},
        }
    }


@routes.get("/get_world_size", Permission(ANY_KEY), response_model=None)
async def world_size() -> dict[str, int]:
    """vLLM's number of workers of a replica: each engine has one GPU."""
    return {"world_size": 1}


async def _answered(work: Awaitable[object], success: str) -> Response:
    try:
        await work
    except TemperError as error:
        status, kind = _vllm(error)
        body = {"message": error.message, "type": kind, "param": error.param, "code": status}
        # Older releases of vLLM had the fields outermost, and production-stack's operator reads them there.
        return JSONResponse({"object": "error", **body, "error": body}, status)
    return PlainTextResponse(success)


def _vllm(error: TemperError) -> tuple[int, str]:
    """Status and type of an error at vLLM."""
    if isinstance(error, NotFound):
        return 404, "NotFoundError"
    if isinstance(error, Conflict | InvalidRequest):
        return 400, "InvalidUserInput"
    status = status_of(error)
    return (400, "BadRequestError") if status == 422 else (status, "InternalServerError")
