"""Futures of Tinker's API: waiting for a request, and its answer in the form that the SDK reads."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import Request, Response
from pydantic import ValidationError
from pydantic_core import from_json, to_json

from services.common.errors import Gone, NotFound
from services.common.pb import sessions_pb2 as pb
from services.gateway.api.base.routing import Inference, Routes
from services.gateway.api.training.tinker.bodies import Cancel, Retrieve, Sample
from services.gateway.api.training.tinker.names import CheckpointKind, RequestId, RunId, Sampler, check_checkpoint_name
from services.gateway.api.training.tinker.records import CheckpointRecord
from services.gateway.api.training.tinker.sampling import completion_of, draw
from services.gateway.api.training.tinker.service_routes import policy_of
from services.gateway.api.training.tinker.services import Tinker, TinkerServices
from services.gateway.api.training.tinker.wire import output_of
from services.gateway.auth.caller import owner
from services.gateway.auth.route_permissions import ANY_KEY, INFERENCE, Permission
from services.gateway.core.errors import engine_error, status_of
from services.gateway.inference.generation import reserve, traceparent_of

routes = Routes("tinker")
_WAIT_SECONDS = 25.0
"""Longest wait for a future; the SDK gives up after 45 s."""
_PROTOBUF = "application/x-protobuf"


@routes.post("/api/v1/asample", Permission(INFERENCE, generates=True), include_in_schema=False)
async def asample(request: Request, body: Sample, tinker: Tinker, inference: Inference) -> dict[str, Any]:
    """Begins to draw samples."""
    if body.sampling_session_id is not None and body.seq_id is not None:
        sampler = Sampler.parse(body.sampling_session_id)
        await tinker.records.session(sampler.session)
        name, policy = f"{sampler}:{body.seq_id}", sampler.policy
    else:
        policy = await policy_of(tinker, body.base_model, body.model_path)
        name = str(request.state.request_id)
    completion = completion_of(body, policy, tinker.settings.served_model_name)
    promise = {
        "request_id": str(RequestId("sample", {"name": name, "owner": owner()})),
        "sample_sequence_ids": [f"{name}:{number}" for number in range(body.num_samples)],
    }
    if not tinker.samples.known(name):
        reservation = reserve(inference, completion, prompts=1)
        trace = traceparent_of(request)
        await tinker.samples.begin(name, lambda: draw(inference, body, completion, reservation, trace))
    return promise


@routes.post("/api/v1/cancel_future", Permission(INFERENCE), status_code=204, include_in_schema=False)
async def cancel_future(body: Cancel, tinker: Tinker) -> Response:
    """Ends a sample that nobody waits for any more."""
    asked = RequestId.parse(body.request_id)
    if asked.kind == "sample" and asked.about.get("owner") == owner():
        tinker.samples.cancel(str(asked.about.get("name")))
    return Response(status_code=204)


@routes.post("/api/v1/retrieve_future", Permission(ANY_KEY), response_class=Response, include_in_schema=False)
async def retrieve_future(body: Retrieve, tinker: Tinker) -> Response:
    """The answer of a request; 408 while there is none."""
    asked = RequestId.parse(body.request_id)
    try:
        return await _answer(tinker, body.request_id, asked)
    except (KeyError, TypeError, ValidationError) as error:  # an id that is not as this server makes them
        raise NotFound("no such request", param="request_id") from error


async def _answer(tinker: TinkerServices, request_id: str, asked: RequestId) -> Response:
    match asked.kind:
        case "made":
            run = await tinker.records.run(RunId.parse(str(asked.about["run"])))
            return _json({"type": "create_model", "model_id": run.id})
        case "loaded":
            run = await tinker.records.run(RunId.parse(str(asked.about["run"])))
            return _json({"type": "load_weights", "model_id": run.id, "path": asked.about.get("path")})
        case "sample":
            return await _sample(tinker, request_id, asked.about)
    return await _call(tinker, request_id, asked.about)


async def _sample(tinker: TinkerServices, request_id: str, about: dict[str, Any]) -> Response:
    if about.get("owner") != owner():
        raise NotFound("no such request", param="request_id")
    outcome = await tinker.samples.outcome(str(about["name"]), _WAIT_SECONDS)
    match outcome.state:
        case "done":
            return Response(outcome.answer, media_type=_PROTOBUF)
        case "running":
            return _try_again(request_id)
        case "failed":
            return _failed(outcome.message, user=outcome.user)
    raise Gone(f"{outcome.message or 'the sample is lost'}: send it again", param="request_id")


async def _call(tinker: TinkerServices, request_id: str, about: dict[str, Any]) -> Response:
    found = await tinker.sessions.wait(str(about["future"]), _WAIT_SECONDS, tinker.lifecycle.closing)
    if found.state == pb.FUTURE_STATE_PENDING:
        return _try_again(request_id)
    if found.HasField("error"):
        error = engine_error(found.error)
        return _failed(error.message, user=400 <= status_of(error) < 500 and not isinstance(error, Gone))
    result = from_json(found.result_json)
    match found.operation:
        case "forward" | "forward_backward":
            widths = _widths(about, len(result["logprobs"]))
            return Response(await asyncio.to_thread(output_of, result, widths), media_type=_PROTOBUF)
        case "optim_step":
            return _json({"metrics": {"grad_norm:mean": result["grad_norm"], "step:max": result["step"]}})
        case "load":
            return _json({"type": "load_weights", "model_id": about["run"], "path": about["path"]})
    return _json(await _saved(tinker, about, result))


def _widths(about: dict[str, Any], columns: int) -> list[int]:
    """Targets of a position of each datum. Raises TypeError if they are not those of the call: a client has made up the
    id."""
    widths = about.get("widths") or [0] * columns
    whole = isinstance(widths, list) and all(type(width) is int and width >= 0 for width in widths)
    if not whole or sum(width or 1 for width in widths) != columns:
        raise TypeError("not the widths of this call")
    return widths


async def _saved(tinker: TinkerServices, about: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """The answer of a save, whose checkpoint is recorded now that it is there."""
    run = await tinker.records.run(RunId.parse(about["run"]))
    target = str(result.get("checkpoint") or result["adapter"])
    kind: CheckpointKind = "weights" if "checkpoint" in result else "sampler_weights"
    answer = {"type": "save_weights" if kind == "weights" else "save_weights_for_sampler"}
    run_id = RunId.parse(run.id)
    if "sampler" in about:
        policy = run.adapter if about["inflight"] else target
        return {**answer, "sampling_session_id": str(Sampler(run_id.session, int(about["sampler"]), policy))}
    record = CheckpointRecord(
        run=run.id,
        owner=run.owner,
        kind=kind,
        name=check_checkpoint_name(str(about["name"])),
        target=target,
        created_at=about["created_at"],
        size_bytes=result.get("bytes"),
        expires_at=about.get("expires_at"),
        user_metadata=about.get("user_metadata"),
    )
    await tinker.records.add_checkpoint(record)
    return {**answer, "path": record.path}


def _json(body: dict[str, Any]) -> Response:
    return Response(to_json(body, inf_nan_mode="null"), media_type="application/json")


def _failed(message: str, *, user: bool) -> Response:
    return _json({"error": message, "category": "user" if user else "server"})


def _try_again(request_id: str) -> Response:
    body = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
    return Response(to_json(body), 408, media_type="application/json")
