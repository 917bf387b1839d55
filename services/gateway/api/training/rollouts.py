"""Makes a job self-contained: rollouts are fetched from the engines and written in for its completion ids."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from services.common.adapters.names import BASE
from services.common.errors import InvalidRequest, NotFound
from services.common.jobs import GrpoCompletion, GrpoGroup, GrpoJob, SftExample, SftJob
from services.common.jobs.token_checks import check_segments
from services.common.jobs.training_sessions.calls import Forward, ForwardBackward
from services.common.jobs.training_sessions.data import Datum
from services.common.jobs.trajectories.session_data import ForwardBackwardBody, ForwardBody, TrajectoryDatum
from services.common.jobs.trajectories.stored import StoredTrajectory, unnumbered
from services.common.pb import engine_pb2
from services.gateway.api.training.trajectories import Rollouts, Sessions, learnable, resolved, sessions_of
from services.gateway.api.training.validation import served_limits
from services.gateway.auth.caller import owner
from services.gateway.engines.calls.rollouts import rollouts_by_id
from services.gateway.engines.pool import EnginePool
from services.gateway.engines.served_model import ServedModel

_NAMED_IDS = 5


async def resolve_examples(job: SftJob, engines: EnginePool) -> SftJob:
    """Job with segments in place of trajectories by ids. Raises as resolve_rollouts."""
    if not job.stored:
        return job
    ids = list(dict.fromkeys(name for one in job.stored for name in one.ids))
    found = await fetched(ids, engines, "examples")
    sessions = await sessions_of(job.stored, engines, "examples")
    return await asyncio.to_thread(_examples_written_in, job, found, sessions)


def _examples_written_in(job: SftJob, found: Rollouts, sessions: Sessions) -> SftJob:
    written: dict[str, list[SftExample]] = {"examples": [], "eval_examples": []}
    for place, example in job.numbered_examples():
        if isinstance(example.trajectory, StoredTrajectory):
            trajectory = resolved(example.trajectory, found, sessions, f"{place}.trajectory")
            example = example.model_copy(update={"trajectory": trajectory})
        written[place.partition("[")[0]].append(example)
    return job.model_copy(update=written)


async def resolve_data(body: ForwardBody | ForwardBackwardBody, engines: EnginePool) -> Forward | ForwardBackward:
    """Call of a training session with sequences in place of trajectories.

    Raises:
        InvalidRequest: a trajectory cannot be such a sequence.
        NotFound, Unavailable: see resolve_rollouts.
    """
    played = [one.trajectory for one in body.data if isinstance(one, TrajectoryDatum)]
    stored = [one for one in played if isinstance(one, StoredTrajectory)]
    found = await fetched(list(dict.fromkeys(name for one in stored for name in one.ids)), engines, "data")
    sessions = await sessions_of(stored, engines, "data")
    return await asyncio.to_thread(_data_written_in, body, engines.served, found, sessions)


def _data_written_in(
    body: ForwardBody | ForwardBackwardBody, served: ServedModel, found: Rollouts, sessions: Sessions
) -> Forward | ForwardBackward:
    data: list[Datum] = []
    for index, datum in enumerate(body.data):
        field = f"data[{index}]"
        if isinstance(datum, Datum):
            data.append(datum)
            continue
        trajectory = datum.trajectory
        if isinstance(trajectory, StoredTrajectory):
            trajectory = resolved(trajectory, found, sessions, f"{field}.trajectory")
        check_segments(served_limits(served), f"{field}.trajectory", trajectory)
        sampled = body.loss != "cross_entropy"
        data.append(
            datum.sequence(served.codec, trajectory, sampled=sampled, temperature=body.temperature, field=field)
        )
    kind: type[Forward | ForwardBackward] = Forward if isinstance(body, ForwardBody) else ForwardBackward
    fields = {name: getattr(body, name) for name in ("seq", "loss", "loss_config", "temperature")}
    return kind(data=data, **fields)


async def resolve_rollouts(job: GrpoJob, engines: EnginePool) -> GrpoJob:
    """Job with token ids and log-probabilities in place of completion ids.

    Raises:
        NotFound: completions that no engine remembers, or that another API key sampled; the message names them.
        InvalidRequest: a completion is scored twice, or a group mixes prompts.
        Unavailable: an engine that may know them cannot be asked.
    """
    ids, stored = job.completion_ids, job.stored
    if not ids and not stored:
        return job
    field = "groups" if job.rollouts is None else "rollouts"
    # A turn may be in several trajectories, which part behind it.
    turns = {turn for one in stored for turn in one.ids}
    _refuse_repeats([name for name in ids if name not in turns], field)
    found = await fetched(list(dict.fromkeys(ids)), engines, field)
    sessions = await sessions_of(stored, engines, field)
    # Millions of tokens may be copied and checked: not on the event loop.
    return await asyncio.to_thread(_written_in, job, found, sessions)


def _written_in(job: GrpoJob, found: Rollouts, sessions: Sessions) -> GrpoJob:
    if job.rollouts is not None:
        groups = _group_by_prompt(
            (found[scored.completion_id], scored.reward, f"rollouts[{index}]")
            for index, scored in enumerate(job.rollouts)
        )
    else:
        groups = [
            _resolve_group(group, found, sessions, f"groups[{index}]") for index, group in enumerate(job.groups or ())
        ]
    return job.model_copy(update={"rollouts": None, "groups": groups})


def _refuse_repeats(ids: Sequence[str], field: str) -> None:
    seen: set[str] = set()
    for completion_id in ids:
        if (same := unnumbered(completion_id)) in seen:
            raise InvalidRequest(f"completion {completion_id[:80]!r} is scored twice", param=field)
        seen.add(same)


async def fetched(ids: Sequence[str], engines: EnginePool, field: str) -> dict[str, engine_pb2.Rollout]:
    """Rollouts by the ids the client uses. "{id}:0" also means the only choice of a response.

    Raises:
        NotFound, Unavailable: see resolve_rollouts.
    """
    if not ids:
        return {}
    shorter = {completion_id: unnumbered(completion_id) for completion_id in ids}
    remembered = await rollouts_by_id(engines.clients, sorted({*ids, *shorter.values()}), at_least=len(ids))
    found: dict[str, engine_pb2.Rollout] = {}
    missing = []
    for completion_id, short in shorter.items():
        rollout = remembered.get(completion_id) or remembered.get(short)
        if rollout is None or rollout.owner != owner():
            missing.append(completion_id)
        else:
            found[completion_id] = rollout
    if missing:
        named = ", ".join(completion_id[:80] for completion_id in missing[:_NAMED_IDS])
        more = f" and {len(missing) - _NAMED_IDS} more" if len(missing) > _NAMED_IDS else ""
        raise NotFound(
            f"no engine remembers the completion(s) {named}{more}: they are kept for a while only; generate with "
            "return_token_ids and post groups with token_ids and logprobs instead",
            param=field,
        )
    return found


def _completion(rollout: engine_pb2.Rollout, reward: float, field: str) -> GrpoCompletion:
    with learnable(field):
        return GrpoCompletion(
            token_ids=list(rollout.token_ids),
            logprobs=list(rollout.sampling_logprobs),
            temperature=rollout.temperature,
            truncated=rollout.finish_reason == engine_pb2.FINISH_REASON_LENGTH,
            adapter=rollout.adapter or BASE,
            reward=reward,
        )


def _group_by_prompt(scored: Iterable[tuple[engine_pb2.Rollout, float, str]]) -> list[GrpoGroup]:
    """Groups of rollouts, each with its reward and its place in the job."""
    by_prompt: dict[tuple[int, ...], list[GrpoCompletion]] = {}
    for rollout, reward, field in scored:
        by_prompt.setdefault(tuple(rollout.prompt_token_ids), []).append(_completion(rollout, reward, field))
    return [
        GrpoGroup(prompt_token_ids=list(prompt), completions=completions) for prompt, completions in by_prompt.items()
    ]


def _resolve_group(group: GrpoGroup, found: Rollouts, sessions: Sessions, field: str) -> GrpoGroup:
    if group.trajectories is not None:
        members = [
            resolved(one, found, sessions, f"{field}.trajectories[{index}]")
            if isinstance(one, StoredTrajectory)
            else one
            for index, one in enumerate(group.trajectories)
        ]
        return group.model_copy(update={"trajectories": members})
    rollouts = [found[c.completion_id] for c in group.completions if c.completion_id is not None]
    if not rollouts:
        return group
    prompts = {tuple(rollout.prompt_token_ids) for rollout in rollouts}
    if group.prompt_token_ids is not None:
        prompts.add(tuple(group.prompt_token_ids))
    if len(prompts) > 1:
        raise InvalidRequest(
            f"{field}: its completions answer {len(prompts)} different prompts; a group has one", param=field
        )
    completions = [
        c if c.completion_id is None else _completion(found[c.completion_id], c.reward, f"{field}.completions[{index}]")
        for index, c in enumerate(group.completions)
    ]
    # The tokens the model saw replace a prompt given as text.
    return GrpoGroup(prompt_token_ids=list(prompts.pop()), completions=completions)
