"""Training in Tinker's API: runs are opened, and each of their requests is a call of a training session."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

from fastapi import Request
from pydantic import BaseModel
from pydantic_core import from_json

from services.common.errors import InvalidRequest, NotFound
from services.common.jobs.fields.lora import LoraSettings
from services.common.jobs.training_sessions.calls import Call, Load, OpenSession, OptimStep, Save
from services.gateway.api.base.routing import Routes
from services.gateway.api.training.tinker.bodies import (
    Adam,
    CreateModel,
    LoadNewRun,
    LoadWeights,
    Lora,
    Numbered,
    OfModel,
    SaveForSampler,
    SaveWeights,
    checked,
)
from services.gateway.api.training.tinker.bodies import OptimStep as OptimStepBody
from services.gateway.api.training.tinker.names import (
    CheckpointPath,
    RequestId,
    RunId,
    check_checkpoint_name,
)
from services.gateway.api.training.tinker.records import RunRecord
from services.gateway.api.training.tinker.services import Tinker, TinkerServices, refusal, submit
from services.gateway.api.training.tinker.wire import parse, scoring_of
from services.gateway.auth.caller import owner
from services.gateway.auth.route_permissions import ANY_KEY, TRAIN, Permission

routes = Routes("tinker")
Model = TypeVar("Model", bound=BaseModel)
Planned: TypeAlias = tuple[Call, dict[str, Any]]
"""A call, and the parts of its answer that the engine does not know."""
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
ADAPTER = "adapter"
"""Key of a run's user_metadata: the adapter whose versions its samplers become."""


def _promise(request: RequestId) -> dict[str, Any]:
    """Answer to every request that takes its time: the client waits for it by retrieve_future."""
    return {"request_id": str(request), "model_id": request.about["run"]}


@routes.post("/api/v1/create_model", Permission(TRAIN, audited=True), include_in_schema=False)
async def create_model(body: CreateModel, tinker: Tinker) -> dict[str, Any]:
    """Opens a training session with a new adapter; answers when it can be called."""
    tinker.check_base_model(body.base_model)
    if body.lora_config is None:
        raise InvalidRequest("lora_config is missing: adapters are all that is trained here", param="lora_config")
    run = await _new_run(tinker, body.session_id, body.model_seq_id)
    await _open(tinker, run, OpenSession(lora=_lora(body.lora_config, tinker)), body.lora_config, body.user_metadata)
    return _promise(RequestId("made", {"run": str(run)}))


@routes.post("/api/v1/load_weights", Permission(TRAIN, audited=True), include_in_schema=False)
async def load_weights(body: Numbered | LoadNewRun, tinker: Tinker) -> dict[str, Any]:
    """Weights of a checkpoint, for a run that exists or for a new one."""
    if isinstance(body, Numbered):

        async def load(asked: LoadWeights, _: RunRecord) -> Planned:
            return checked(Load, {"seq": asked.seq_id, **await _source(tinker, asked)}), {"path": asked.path}

        return await _numbered(tinker, body, LoadWeights, load)
    run = await _new_run(tinker, body.session_id, body.model_seq_id)
    await _open(tinker, run, checked(OpenSession, await _source(tinker, body)), None, body.user_metadata)
    return _promise(RequestId("loaded", {"run": str(run), "path": body.path}))


@routes.post("/api/v1/get_info", Permission(ANY_KEY), include_in_schema=False)
async def get_info(body: OfModel, tinker: Tinker) -> dict[str, Any]:
    """A run's model."""
    run = await tinker.records.run(RunId.parse(body.model_id))
    return {
        "type": "get_info",
        "model_data": {"arch": "qwen3.5", "model_name": run.base_model},
        "model_id": run.id,
        "is_lora": True,
        "lora_rank": run.rank,
        "model_name": run.base_model,
    }


@routes.post("/api/v1/forward_backward", Permission(TRAIN, audited=True), include_in_schema=False)
async def forward_backward(request: Request, tinker: Tinker) -> dict[str, Any]:
    """Forward or forward_backward; the body is protobuf."""
    message = await asyncio.to_thread(parse, await request.body())
    record = await tinker.records.run(RunId.parse(message.model_id))
    if message.seq_id < 1:
        raise InvalidRequest("seq_id counts from 1", param="seq_id")
    widths: tuple[int, ...] = ()
    try:
        scoring = await asyncio.to_thread(scoring_of, message, tinker.settings.session_call_tokens)
    except InvalidRequest as error:
        call: Call = refusal(message.seq_id, error, gradient=not message.forward_only)
    else:
        call, widths = scoring.call, scoring.widths
    about = {"widths": widths} if any(widths) else {}
    return _promise(await submit(tinker, record, call, about))


@routes.post("/api/v1/optim_step", Permission(TRAIN, audited=True), include_in_schema=False)
async def optim_step(body: Numbered, tinker: Tinker) -> dict[str, Any]:
    """An AdamW step."""

    async def step(asked: OptimStepBody, _: RunRecord) -> Planned:
        return _step(asked.seq_id, asked.adam_params), {}

    return await _numbered(tinker, body, OptimStepBody, step)


@routes.post("/api/v1/save_weights", Permission(TRAIN, audited=True), include_in_schema=False)
async def save_weights(body: Numbered, tinker: Tinker) -> dict[str, Any]:
    """A checkpoint with the optimizer, to train on from."""

    async def save(asked: SaveWeights, record: RunRecord) -> Planned:
        run = RunId.parse(record.id)
        name = check_checkpoint_name(asked.path if asked.path is not None else f"{asked.seq_id:06d}")
        if not asked.overwrite and await _exists(tinker, run, name):
            raise InvalidRequest(
                f"there is a checkpoint {name!r} of this run already: choose another name, or set overwrite",
                param="path",
            )
        call = checked(Save, {"seq": asked.seq_id, "checkpoint": run.checkpoint(name)})
        return call, {"name": name, **_kept(asked)}

    return await _numbered(tinker, body, SaveWeights, save)


@routes.post("/api/v1/save_weights_for_sampler", Permission(TRAIN, audited=True), include_in_schema=False)
async def save_weights_for_sampler(body: Numbered, tinker: Tinker) -> dict[str, Any]:
    """A version of the run's adapter."""

    async def save(asked: SaveForSampler, record: RunRecord) -> Planned:
        if asked.path is not None:
            named: dict[str, Any] = {"name": check_checkpoint_name(asked.path)}
        elif asked.sampling_session_seq_id is not None:
            named = {"sampler": asked.sampling_session_seq_id, "inflight": asked.kind == "inflight"}
        else:
            raise InvalidRequest("give path or sampling_session_seq_id", param="path")
        call = checked(Save, {"seq": asked.seq_id, "name": record.adapter})
        return call, {**named, **_kept(asked)}

    return await _numbered(tinker, body, SaveForSampler, save)


@routes.post("/api/v1/save_weights_external", Permission(TRAIN, audited=True), include_in_schema=False)
async def save_weights_external(body: Numbered, tinker: Tinker) -> dict[str, Any]:
    """Refused: versions of adapters are in PEFT's format already."""
    record = await tinker.records.run(RunId.parse(body.model_id))
    error = InvalidRequest(
        "save_weights_external is not supported: save_weights_for_sampler makes a version of an adapter, which "
        f"GET /v1/adapters/{record.adapter}/versions/<version>/download has in PEFT's format",
        param="path",
    )
    return _promise(await submit(tinker, record, refusal(body.seq_id, error), {}))


async def _numbered(
    tinker: TinkerServices, body: Numbered, model: type[Model], plan: Callable[[Model, RunRecord], Awaitable[Planned]]
) -> dict[str, Any]:
    """Submits a call of a run, or in its place what is wrong with it."""
    record = await tinker.records.run(RunId.parse(body.model_id))
    about: dict[str, Any] = {}
    try:
        call, about = await plan(checked(model, body.sent), record)
    except (InvalidRequest, NotFound) as error:
        call = refusal(body.seq_id, error)
    return _promise(await submit(tinker, record, call, about))


def _kept(body: SaveWeights | SaveForSampler) -> dict[str, Any]:
    now = time.time()
    expires_at = None if body.ttl_seconds is None else now + body.ttl_seconds
    kept = {"created_at": now, "expires_at": expires_at, "user_metadata": body.user_metadata}
    return {name: value for name, value in kept.items() if value is not None}


async def _exists(tinker: TinkerServices, run: RunId, name: str) -> bool:
    try:
        await tinker.records.checkpoint(run, "weights", check_checkpoint_name(name))
    except (NotFound, InvalidRequest):
        return False
    return True


async def _source(tinker: TinkerServices, body: LoadWeights | LoadNewRun) -> dict[str, Any]:
    """The part of OpenSession and Load that says where weights come from."""
    if body.base_model is not None:
        tinker.check_base_model(body.base_model)
    path = CheckpointPath.parse(body.path)
    if path.run is not None:
        found = await tinker.records.checkpoint(path.run, path.kind, path.name)
        if path.kind == "weights":
            return {"checkpoint": found.target, "fresh_optimizer": not body.optimizer}
        target = found.target
    else:
        target = str(path.adapter)
    if body.optimizer:
        raise InvalidRequest(
            f"{body.path} has weights for sampling and no optimizer: save_state keeps both, or load without",
            param="path",
        )
    return {"adapter": target}


async def _new_run(tinker: TinkerServices, session: str, number: int) -> RunId:
    record = await tinker.records.session(session)
    if record.finished is not None:
        raise InvalidRequest(f"session {session} is finished: create a new ServiceClient", param="session_id")
    return RunId(record.id, number)


async def _open(
    tinker: TinkerServices, run: RunId, request: OpenSession, lora: Lora | None, user_metadata: dict[str, Any] | None
) -> None:
    """Opens the training session of a run, once however often it is asked for."""
    adapter = _adapter(run, user_metadata)
    try:
        await tinker.records.run(run)
    except NotFound:
        task = tinker.opening.get(str(run))
        if task is None:
            task = asyncio.create_task(_opened(tinker, run, request, lora, user_metadata, adapter))
            tinker.opening[str(run)] = task
            task.add_done_callback(lambda _: tinker.opening.pop(str(run), None))
        # A client that gives up asks again.
        await asyncio.shield(task)


async def _opened(
    tinker: TinkerServices,
    run: RunId,
    request: OpenSession,
    lora: Lora | None,
    user_metadata: dict[str, Any] | None,
    adapter: str,
) -> None:
    opened = from_json(await tinker.sessions.open(request.model_copy(update={"metadata": {"tinker": str(run)}})))
    await tinker.records.add_run(
        RunRecord(
            id=str(run),
            owner=owner(),
            created_at=time.time(),
            training_session=opened["id"],
            base_model=tinker.base_model,
            rank=opened["lora"]["rank"],
            adapter=adapter,
            train_mlp=None if lora is None else lora.train_mlp,
            train_attn=None if lora is None else lora.train_attn,
            user_metadata=user_metadata,
        )
    )


def _adapter(run: RunId, user_metadata: dict[str, Any] | None) -> str:
    chosen = (user_metadata or {}).get(ADAPTER)
    if chosen is None:
        return run.adapter
    return checked(Save, {"seq": 1, "name": chosen}).name or run.adapter


def _lora(asked: Lora, tinker: TinkerServices) -> LoraSettings:
    if not (asked.train_mlp or asked.train_attn):
        raise InvalidRequest(
            "train_mlp and train_attn are both false, and the unembedding is not trained here: set one of them",
            param="lora_config",
        )
    most = tinker.engines.served.info.max_lora_rank
    if most and asked.rank > most:
        raise InvalidRequest(
            f"rank is {asked.rank}, and engines serve adapters up to rank {most} (TEMPER_MAX_LORA_RANK)",
            param="lora_config.rank",
        )
    fields: dict[str, Any] = {"rank": asked.rank, "seed": secrets.randbits(31) if asked.seed is None else asked.seed}
    if not asked.train_mlp or not asked.train_attn:
        fields["target_modules"] = list(_ATTENTION if asked.train_attn else _MLP)
    return checked(LoraSettings, fields)


def _step(seq: int, adam: Adam) -> OptimStep:
    return OptimStep(
        seq=seq,
        learning_rate=adam.learning_rate,
        beta1=adam.beta1,
        beta2=adam.beta2,
        eps=adam.eps,
        weight_decay=adam.weight_decay,
        max_grad_norm=adam.grad_clip_norm or None,
    )
