"""Sampling of a job's rounds: which prompts a round has, and completions by the adapter as it is now."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from services.engine.models.lora.trainable import LoraParams
from services.trainer.host.rollouts import Completion, RolloutRequest, RolloutSampling, RolloutSource, sample
from services.trainer.packing import shuffled
from services.trainer.sampling.rounds.groups import going_on
from services.trainer.sampling.rounds.newest import NewestPolicy, PolicyAt
from services.trainer.timers import StepTimer

P = TypeVar("P")


class RoundSampler(Generic[P]):
    """Sampler of the rounds of one job.

    Args:
        source: the engine beside the job.
        prompts: all prompts of the job.
        size: prompts of each round.
        seed: of the order in which rounds take them.
        max_tokens: of each completion.
        stop_token_ids: beside the model's own end tokens.
    """

    def __init__(
        self,
        source: RolloutSource,
        prompts: Sequence[P],
        *,
        size: int,
        seed: int,
        max_tokens: int,
        stop_token_ids: Iterable[int],
    ) -> None:
        self._source = source
        self._prompts = prompts
        self._size = size
        self._seed = seed
        self._max_tokens = max_tokens
        self._stop_token_ids = frozenset(stop_token_ids)

    def chosen(self, number: int) -> list[P]:
        """The prompts of a round: the next ``size`` of an endless series of shuffled passes over all of them."""
        orders: dict[int, list[int]] = {}
        chosen = []
        for position in range(number * self._size, (number + 1) * self._size):
            epoch, place = divmod(position, len(self._prompts))
            if epoch not in orders:
                orders[epoch] = shuffled(len(self._prompts), seed=self._seed, epoch=epoch)
            chosen.append(self._prompts[orders[epoch][place]])
        return chosen

    def sample(
        self,
        lora: LoraParams,
        requests: Sequence[RolloutRequest],
        temperature: float,
        watch: StepTimer,
        interrupt: Callable[[], None],
        cut: Callable[[int], bool] | None = None,
    ) -> list[Completion]:
        """Completions of these requests; the time goes into ``watch``. ``cut`` is that of RolloutSource.generate.
        Raises like RolloutSource."""
        sampling = RolloutSampling(temperature, self._max_tokens, self._stop_token_ids)
        return sample(self._source, lora, requests, sampling, watch, interrupt, cut)

    def sample_some(
        self,
        policy: PolicyAt,
        requests: Sequence[RolloutRequest],
        temperature: float,
        watch: StepTimer,
        interrupt: Callable[[], None],
        *,
        enough: int,
        newest: NewestPolicy | None,
    ) -> tuple[list[Completion], int]:
        """The same until enough have ended; the others are cut. Their tokens say by which policies they are.

        Args:
            policy: the one that begins.
            newest: hands on newer ones, with which those that are under way go on: cut, and asked for anew, so that the
                new policy reads what there is of them and nothing that the old one computed is used. None: ``policy``
                ends what it began.

        Returns:
            A completion a request; and how often one went on with a newer policy.
        """
        found: dict[int, Completion] = {}
        left = dict(enumerate(requests))
        changed = 0
        while True:
            version, before = policy.version, len(requests) - len(left)

            def cut(ended: int, before: int = before, version: float = version) -> bool:
                return before + ended >= enough or (newest is not None and newest.after(version) is not None)

            some = self.sample(policy.lora, list(left.values()), temperature, watch, interrupt, cut)
            found |= {at: one.by(version) for at, one in zip(left, some, strict=True)}
            left = {at: going_on(requests[at], found[at]) for at in left if found[at].cut}
            newer = None if newest is None else newest.after(version)
            if len(requests) - len(left) >= enough or newer is None:
                return [found[at] for at in range(len(requests))], changed
            policy = newer
            changed += sum(bool(found[at].token_ids) for at in left)
