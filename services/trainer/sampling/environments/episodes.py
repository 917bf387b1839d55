"""Episodes of a round, all under way at once: each answers, its environment says what comes of it, and it answers
again, without waiting for the others.

What was sampled is never tokenized again: behind its tokens go those that the chat template writes around what the
environment says. An episode whose environment fails begins again in a fresh one, or is dropped as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.common.errors import TemperError
from services.common.jobs import JobBase
from services.common.jobs.fields.messages import as_turns
from services.common.jobs.fields.prompts import PromptFields
from services.common.jobs.kinds.environment import OBSERVATION, EnvironmentReward, FailureKind
from services.common.jobs.trajectories.documents import observation_tokens
from services.common.jobs.trajectories.segments import Observation
from services.common.text.tokenizer import TextCodec
from services.trainer.host.rollouts import Completion, RolloutRequest, RolloutStream
from services.trainer.sampling.answers import ReadAnswer, read_answer
from services.trainer.sampling.environments.world import EnvironmentFailed, World, Worlds, check_reward
from services.trainer.sampling.prompts import sample_seed

_LOOK_SECONDS = 0.05
"""Seconds between two checks whether the job may continue."""
_PAUSE_SECONDS = 0.25
"""Pause before a second attempt; each further one doubles it."""
_LONGEST_PAUSE = 5.0


@dataclass(frozen=True, slots=True)
class Start:
    """Where an episode begins."""

    asked: PromptFields
    tools: Sequence[Mapping[str, Any]]
    """Tools that the prompt is rendered with."""
    reset: Mapping[str, Any]
    """What the environment's reset gets."""
    seed: int
    """Seed of what is sampled."""


@dataclass(slots=True)
class Episode:
    """An episode from its beginning to its end."""

    prompt: tuple[int, ...]
    actions: list[Completion] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    """Reward of the environment for each action."""
    observations: list[tuple[int, ...]] = field(default_factory=list)
    """Tokens between the actions."""
    truncated: bool = False
    """It was cut off: its turns or tokens were used up."""
    answer: ReadAnswer | None = None
    """The last one."""
    others: float = 0.0
    """Weighted scores of the rewards beside the environment's."""
    state: str = ""
    """Digest of the state that the environment was in at the beginning; empty: it does not tell."""
    failures: tuple[FailureKind, ...] = ()
    """Failures of environments before the one that it came to its end in."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """All of it so far."""
        found = list(self.prompt)
        for place, action in enumerate(self.actions):
            found += action.token_ids
            found += self.observations[place] if place < len(self.observations) else ()
        return tuple(found)

    @property
    def gained(self) -> float:
        """Sum of the environment's rewards."""
        return sum(self.rewards)


@dataclass(frozen=True, slots=True)
class Dropped:
    """An episode that no environment brought to its end."""

    failures: tuple[FailureKind, ...]
    reason: str
    """Of the last failure."""


class Player:
    """Plays episodes of one job.

    Args:
        most_tokens: of one episode.
        max_tokens: of one answer.
    """

    def __init__(
        self,
        codec: TextCodec,
        job: JobBase,
        environment: EnvironmentReward,
        worlds: Worlds,
        *,
        most_tokens: int,
        max_tokens: int,
    ) -> None:
        self._codec = codec
        self._job = job
        self._environment = environment
        self._worlds = worlds
        self._most_tokens = most_tokens
        self._max_tokens = max_tokens

    def play(
        self, starts: Sequence[Start], stream: RolloutStream, interrupt: Callable[[], None], enough: int | None = None
    ) -> list[Episode | Dropped | None]:
        """One episode a start, in their order. Blocks; ``interrupt`` is called several times a second and may raise.

        Args:
            enough: so many are waited for; the others are ended where they are, and nothing is left of them (None).

        Raises:
            InvalidRequest: a prompt does not fit.
            TemperError: as RolloutStream says.
        """
        return asyncio.run(self._play(starts, stream, interrupt, len(starts) if enough is None else enough))

    async def _play(
        self, starts: Sequence[Start], stream: RolloutStream, interrupt: Callable[[], None], enough: int
    ) -> list[Episode | Dropped | None]:
        places = asyncio.Semaphore(min(self._environment.concurrency, stream.most))
        tasks = [asyncio.create_task(self._in_turn(places, start, stream)) for start in starts]
        left = set(tasks)
        try:
            while len(tasks) - len(left) < enough:
                done, left = await asyncio.wait(left, timeout=_LOOK_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
                for task in done:
                    task.result()
                interrupt()
                stream.check()
        finally:
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        return [None if task in left else task.result() for task in tasks]

    async def _in_turn(self, places: asyncio.Semaphore, start: Start, stream: RolloutStream) -> Episode | Dropped:
        async with places:
            return await self._attempts(start, stream)

    async def _attempts(self, start: Start, stream: RolloutStream) -> Episode | Dropped:
        failures: list[FailureKind] = []
        reason = ""
        for attempt in range(self._environment.attempts):
            if attempt:
                await asyncio.sleep(min(_PAUSE_SECONDS * 2 ** (attempt - 1), _LONGEST_PAUSE))
            try:
                async with self._worlds.open(start.tools) as world:
                    episode = await self._episode(start, attempt, world, stream)
            except EnvironmentFailed as error:
                failures.append(error.kind)
                reason = str(error)
            else:
                episode.failures = tuple(failures)
                return episode
        return Dropped(tuple(failures), reason)

    async def _episode(self, start: Start, attempt: int, world: World, stream: RolloutStream) -> Episode:
        shown = await world.begin(start.reset)
        state = await world.state()
        prompt = self._prompt(start, shown)
        limit = min(self._most_tokens, stream.most_tokens)
        if len(prompt) >= limit:
            raise EnvironmentFailed(
                FailureKind.OVERSIZED,
                f"what it shows makes a prompt of {len(prompt)} tokens, over the limit of {limit}",
            )
        episode = Episode(prompt, state=state)
        while True:
            tokens = episode.tokens
            room = min(self._max_tokens, limit - len(tokens))
            turn = len(episode.actions)
            action = await _sampled(stream, RolloutRequest(tokens, sample_seed(start.seed, attempt, turn)), room)
            episode.actions.append(action)
            episode.answer = read_answer(self._codec, tokens, action, start.tools)
            if action.truncated:
                # Half an answer is nothing to act on.
                episode.rewards.append(0.0)
                episode.truncated = True
                return episode
            outcome = await world.act(episode.answer)
            # A turn has the rewards of all its calls.
            check_reward(self._environment.weight * outcome.reward)
            episode.rewards.append(outcome.reward)
            if outcome.done:
                return episode
            observation = self._observation(outcome.messages, episode.tokens)
            last = len(episode.actions) >= self._environment.max_turns
            if last or len(tokens) + len(action.token_ids) + len(observation) >= limit:
                episode.truncated = True
                return episode
            episode.observations.append(observation)

    def _prompt(self, start: Start, shown: str) -> tuple[int, ...]:
        asked = start.asked.messages if start.asked.prompt is None else start.asked.prompt
        turns = [dict(turn) for turn in as_turns(asked or "")]
        text = str(turns[-1]["content"])
        if OBSERVATION in text:
            text = text.replace(OBSERVATION, shown)
        elif shown:
            text = f"{text}\n\n{shown}"
        turns[-1]["content"] = text
        return tuple(self._codec.encode_chat(turns, tools=list(start.tools) or None, **self._job.chat_template_kwargs))

    def _observation(self, messages: Sequence[Mapping[str, Any]], before: Sequence[int]) -> tuple[int, ...]:
        seen = Observation.model_validate({"type": "observation", "messages": [dict(message) for message in messages]})
        return tuple(observation_tokens(self._codec, seen, after=before, options=self._job.chat_template_kwargs))


async def _sampled(stream: RolloutStream, request: RolloutRequest, max_tokens: int) -> Completion:
    """A completion, once the engine has it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Completion] = loop.create_future()

    def settle(found: Completion | TemperError) -> None:
        if future.done():
            return
        if isinstance(found, TemperError):
            future.set_exception(found)
        else:
            future.set_result(found)

    def tell(found: Completion | TemperError) -> None:
        # The loop may have been closed by an interruption a moment ago: then nobody waits.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, found)

    stream.submit(request, max_tokens, tell)
    return await future
