"""The ideal of a trace, which routing is measured against. It has two parts.

One engine without limits, which computes every step in the time of a small one, says what of each prompt one infinite
cache for the whole fleet would have. A fleet whose engines find just that, wherever a request goes, and whose gateways
give each request to the engine with least to do, says how soon the first token can come. Its gateways know at once what
the others have sent, and take as long with a request as those that are measured. There, too, nothing is found before
somebody has computed it: a request waits for the first token of the one that computes its beginning. An adapter leaves
the object store once, by the store's link, and then every engine has it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.fleet.player import Answered, Player
from benchmarks.fleet.simulation import GATEWAY_SECONDS, Fleet, Outcome, Setting, only_errors, played
from benchmarks.fleet.subject import ADAPTER_LOAD_SECONDS, Subject, without_cache
from benchmarks.fleet.traces import Session
from benchmarks.fleet.virtual import clock
from benchmarks.fleet.virtual.adapters import SharedLink
from services.common.pb import engine_pb2 as pb
from services.gateway.engines.client import EngineClient
from services.gateway.engines.load_balancing import Affinity, Route
from services.gateway.engines.pool import EnginePool
from services.gateway.engines.prefix_index import BLOCK_TOKENS, hash_chain


@dataclass(frozen=True, slots=True)
class Ideal:
    """What a trace would be with everything cached everywhere."""

    cached: Mapping[str, int]
    """Cached prompt tokens of each request."""
    placed: Outcome
    """With these, each request where there is least to do."""


class _LeastLoaded(EnginePool):
    """A gateway that gives each request to the engine with least to do, whatever that has cached."""

    def _choose(self, usable: list[EngineClient], route: Route, affinity: Affinity) -> EngineClient:
        return min(usable, key=lambda client: client.load)


class _Truncating(Player):
    """Sends of each prompt only what is not cached, once the rest has been computed.

    Args:
        cached: prompt tokens of each request that are.
        subject: the size of an adapter, and the links that it comes by.
        gateways: processes that requests pass, each one after the other.
    """

    def __init__(
        self, pools: Sequence[EnginePool], cached: Mapping[str, int], subject: Subject, *, gateways: int
    ) -> None:
        super().__init__(pools, GATEWAY_SECONDS, processes=gateways)
        self._link = SharedLink(subject.store_link, subject.engine_link)
        self._adapter_bytes = subject.adapter_bytes
        self._told: dict[str, asyncio.Event] = {}
        """Events of requests whose first token says that their prompt is computed."""
        self._loaded: dict[str, asyncio.Event] = {}
        self._cached = cached
        self._computing: dict[bytes, asyncio.Event] = {}
        """Beginnings of prompts that were asked, by their hash, and whether they are computed."""

    async def _receive(
        self,
        pool: EnginePool,
        requests: Sequence[pb.GenerateRequest],
        prompts: Sequence[Sequence[int]],
        found: Sequence[Answered],
    ) -> list[int] | None:
        loads = [self._alone(pool, request, prompts[0], one) for request, one in zip(requests, found, strict=True)]
        answers = await asyncio.gather(*loads)
        return None if None in answers else answers[0]

    async def _alone(
        self, pool: EnginePool, request: pb.GenerateRequest, prompt: Sequence[int], found: Answered
    ) -> list[int] | None:
        cached = min(self._cached.get(found.name, 0), len(prompt) - 1)
        await self._adapter(request.adapter.named.name)
        chain = hash_chain(prompt, request.adapter.SerializeToString())
        for block in reversed(chain[: -(-cached // BLOCK_TOKENS)]):
            if (computed := self._computing.get(block)) is not None:
                await computed.wait()
                break
        mine = asyncio.Event()
        for block in chain:
            self._computing.setdefault(block, mine)
        del request.prompt_token_ids[:cached]
        self._told[found.name] = mine
        try:
            return await super()._receive(pool, [request], [prompt[cached:]], [found])
        finally:
            mine.set()

    async def _adapter(self, name: str) -> None:
        """The first request for an adapter waits until it is loaded; then every engine has it."""
        if not name:
            return
        loaded = self._loaded.get(name)
        if loaded is None:
            loaded = self._loaded[name] = asyncio.Event()
            arrived = asyncio.Event()
            self._link.transfer(self._adapter_bytes, arrived.set)
            await arrived.wait()
            await asyncio.sleep(ADAPTER_LOAD_SECONDS)
            loaded.set()
        await loaded.wait()

    def _begun(self, found: Answered) -> None:
        self._told[found.name].set()


def ideal(setting: Setting, sessions: Sequence[Session]) -> Ideal:
    """Simulates the ideal of a trace."""
    cached = infinite_cache(setting, sessions)
    subject = setting.subject

    async def main() -> Outcome:
        fleet = Fleet(without_cache(subject), setting.engines, 1, skipped=cached, pool=_LeastLoaded)
        player = _Truncating(fleet.pools, cached, subject, gateways=setting.gateways)
        return await played(fleet, sessions, setting.seconds, player=player)

    return Ideal(cached, clock.run(main(), setting.seed))


def infinite_cache(setting: Setting, sessions: Sequence[Session]) -> dict[str, int]:
    """What one cache without limits, shared by a whole fleet, has of each prompt when it comes to it."""
    only_errors()
    subject, config = setting.subject, setting.subject.config
    tokens = sum(
        len(session.preamble) + sum(len(turn.message) + sum(turn.outputs) for turn in session.turns)
        for session in sessions
    )
    requests = sum(len(turn.outputs) for session in sessions for turn in session.turns)
    # Room for each token of the trace once, and for every answer with a block of its own at the end.
    limitless = replace(
        config,
        max_num_seqs=requests + 1,
        token_budget=config.max_model_len * (requests + 1),
        mixed_prefill_tokens=None,
        num_blocks=2 * tokens // config.block_size + 4 * requests + 64,
        num_slots=8 * requests + 64,
    )
    giant = replace(
        subject,
        config=limitless,
        max_waiting=requests + 1,
        adapter_slots=max(1, 2 * len(setting.names)),
        store_link=1e15,
        engine_link=1e15,
    )
    step = subject.cost.seconds(8, 8 * 1000.0, 0, 0.0)

    async def main() -> dict[str, int]:
        fleet = Fleet(giant, 1, 1, names=setting.names, step_seconds=step)
        outcome = await played(fleet, sessions, setting.seconds)
        return {one.name: one.cached for one in outcome.answers}

    return clock.run(main(), setting.seed)
