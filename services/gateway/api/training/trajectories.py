"""Trajectories from what the engines remember: the tokens of each completion as they were sampled and read."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pydantic import ValidationError

from services.common.adapters.names import BASE
from services.common.errors import InvalidRequest, NotFound
from services.common.jobs import Action, Observation, Trajectory
from services.common.jobs.trajectories.segments import SampledBy
from services.common.jobs.trajectories.stored import StoredTrajectory
from services.common.pb import engine_pb2
from services.gateway.auth.caller import owner
from services.gateway.engines.calls.rollouts import rollouts_of_sessions
from services.gateway.engines.pool import EnginePool
from services.gateway.inference.engine_request import session_of

Rollouts = Mapping[str, engine_pb2.Rollout]
Sessions = Mapping[str, Sequence[engine_pb2.Rollout]]


async def sessions_of(stored: Iterable[StoredTrajectory], engines: EnginePool, field: str) -> Sessions:
    """Completions of the conversation sessions that trajectories name, in the order in which they ended.

    Raises:
        NotFound: nothing is remembered of one.
        Unavailable: an engine that may know them cannot be asked.
    """
    refs = {one.session_id: session_of(one.session_id) for one in stored if one.session_id is not None}
    if not refs:
        return {}
    remembered = await rollouts_of_sessions(engines.clients, list(refs.values()))
    known = sorted((one for one in remembered if one.owner == owner()), key=lambda one: one.ended_at)
    found = {name: [one for one in known if one.session == ref.name] for name, ref in refs.items()}
    if missing := [name for name, rollouts in found.items() if not rollouts]:
        raise NotFound(
            f"no engine remembers a completion of the session {missing[0][:80]!r}: they are kept for a while only; "
            "give segments with token_ids and logprobs instead",
            param=field,
        )
    return found


def resolved(stored: StoredTrajectory, found: Rollouts, sessions: Sessions, field: str) -> Trajectory:
    """The trajectory by its segments.

    Raises:
        InvalidRequest: a completion's prompt does not begin with the tokens before it, and it is not to be split; or
            they are more than a trajectory may have.
    """
    with learnable(field):
        return _chained(stored, found, sessions, field)


@contextlib.contextmanager
def learnable(field: str) -> Iterator[None]:
    """Refuses what an engine remembers and a job cannot have: no tokens, more turns or reward than the limit."""
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        what = ".".join(map(str, first["loc"]))
        raise InvalidRequest(
            f"{field} cannot be learnt from as the engines remember it: {what}: {first['msg']}: leave it out, or give "
            "less of it",
            param=field,
        ) from error


def _chained(stored: StoredTrajectory, found: Rollouts, sessions: Sessions, field: str) -> Trajectory:
    if stored.session_id is not None:
        chain = [(rollout.completion_id, rollout) for rollout in sessions[stored.session_id]]
    else:
        chain = [(name, found[name]) for name in stored.ids]
    rewards = stored.rewards_given or [None] * len(chain)
    segments: list[Action | Observation] = []
    tokens: list[int] = []
    before = ""
    for (name, rollout), reward in zip(chain, rewards, strict=True):
        prompt = list(rollout.prompt_token_ids)
        same = _common(tokens, prompt)
        if same == len(tokens):
            if seen := prompt[same:]:
                segments.append(Observation(type="observation", token_ids=seen))
        elif stored.split:
            segments.append(Observation(type="observation", token_ids=prompt, restarts=True))
        else:
            raise InvalidRequest(
                f"{field}: {name[:80]} does not go on from {before[:80]}: of the {len(tokens)} tokens before it its "
                f"prompt has the first {same} only (the template or the agent wrote the history in another way). Set "
                "split, so that the context begins anew there, or give them as several trajectories",
                param=field,
            )
        action = _action(rollout, reward)
        last = segments[-1] if segments else None
        if isinstance(last, Action) and last.temperature == action.temperature:
            segments[-1] = _continued(last, action)
        else:
            segments.append(action)
        tokens = [*prompt, *rollout.token_ids]
        before = name
    truncated = stored.truncated
    if truncated is None:
        truncated = chain[-1][1].finish_reason == engine_pb2.FINISH_REASON_LENGTH
    return Trajectory(segments=segments, reward=stored.reward, truncated=truncated)


def _action(rollout: engine_pb2.Rollout, reward: float | None) -> Action:
    return Action(
        type="action",
        token_ids=list(rollout.token_ids),
        logprobs=list(rollout.sampling_logprobs),
        temperature=rollout.temperature,
        adapter=rollout.adapter or BASE,
        reward=reward,
    )


def _continued(first: Action, more: Action) -> Action:
    """A turn that went on in another completion, behind which nothing was seen: one action, of both."""
    spans = [*first.sampled_by, *more.sampled_by]
    versions = [
        SampledBy(adapter=name, tokens=sum(span.tokens for span in same))
        for name, same in itertools.groupby(spans, lambda span: span.adapter)
    ]
    rewards = [one.reward for one in (first, more) if one.reward is not None]
    return Action(
        type="action",
        token_ids=[*first.token_ids, *more.token_ids],
        logprobs=[*(first.logprobs or ()), *(more.logprobs or ())],
        temperature=first.temperature,
        adapter=versions[0].adapter if len(versions) == 1 else None,
        versions=versions if len(versions) > 1 else None,
        reward=math.fsum(rewards) if rewards else None,
    )


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens that both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(first), len(second)))
