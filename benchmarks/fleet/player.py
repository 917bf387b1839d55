"""Player of traces: the clients. It asks gateways by their own request groups, on virtual and on real time alike."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from benchmarks.fleet.traces import Session, Turn
from services.common.errors import TemperError
from services.common.pb import engine_pb2 as pb
from services.gateway.engines.load_balancing import Affinity
from services.gateway.engines.pool import EnginePool


@dataclass(slots=True)
class Answered:
    """One answer, as its client has seen it. Times are of the event loop, seconds."""

    name: str
    asked: float
    prompt_tokens: int
    first: float | None = None
    end: float | None = None
    tokens: int = 0
    """Output tokens of a whole answer; 0: it was not whole."""
    cached: int = 0
    """Prompt tokens that were cached."""
    version: str = ""
    """Adapter version that answered."""
    error: str = ""

    def shift(self, begin: float) -> None:
        """Makes the times those since ``begin``."""
        self.asked -= begin
        self.first = None if self.first is None else self.first - begin
        self.end = None if self.end is None else self.end - begin

    @property
    def whole(self) -> bool:
        """It has everything that was asked for."""
        return self.end is not None and not self.error


class Player:
    """Plays sessions.

    Args:
        pools: one a gateway; requests take them in turn, as a balancer in front gives them out.
        request_seconds: for which a gateway's process is busy with a request before it chooses an engine: so many that
            come at once are sent one after the other.
        processes: of gateways, where more than one choose with one pool.
    """

    def __init__(
        self, pools: Sequence[EnginePool], request_seconds: float = 0.0, *, processes: int | None = None
    ) -> None:
        self._pools = pools
        self._request_seconds = request_seconds
        self._busy_until = [0.0] * (processes or len(pools))
        """Loop time at which each gateway is done with the requests that it has."""
        self._turn = 0
        self._until = float("inf")
        self.answers: list[Answered] = []

    async def play(self, sessions: Sequence[Session], seconds: float) -> None:
        """Plays sessions from now on, and asks nothing new after so many seconds; returns when all is answered."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._until = began + seconds
        async with asyncio.TaskGroup() as tasks:
            for session in sessions:
                await asyncio.sleep(max(0.0, began + session.start - loop.time()))
                tasks.create_task(self._session(session))

    async def play_closed(self, sessions: Sequence[Session], clients: int) -> None:
        """Plays sessions one after the other by so many clients, whenever they would begin."""
        waiting = iter(sessions)

        async def client() -> None:
            for session in waiting:
                await self._session(session)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(clients):
                tasks.create_task(client())

    async def _session(self, session: Session) -> None:
        history = list(session.preamble)
        for number, turn in enumerate(session.turns):
            if turn.think:
                if asyncio.get_running_loop().time() + turn.think > self._until:
                    return
                await asyncio.sleep(turn.think)
            history += turn.message
            answer = await self._ask(session, number, turn, history)
            if answer is None:
                return
            # A simulated engine does not send the tokens in the middle.
            history += answer if len(answer) == turn.outputs[0] else [turn.answer] * turn.outputs[0]

    async def _ask(self, session: Session, number: int, turn: Turn, prompt: list[int]) -> list[int] | None:
        """Asks a turn; returns the tokens of its first answer, None if one broke off: the client gives up."""
        loop = asyncio.get_running_loop()
        names = [f"{session.number}.{number}.{choice}" for choice in range(len(turn.outputs))]
        found = [Answered(name, loop.time(), len(prompt)) for name in names]
        self.answers += found
        requests = [_request(session, turn, *each, prompt) for each in zip(names, turn.outputs, strict=True)]
        gateway = self._turn % len(self._busy_until)
        self._turn += 1
        if self._request_seconds:
            self._busy_until[gateway] = max(loop.time(), self._busy_until[gateway]) + self._request_seconds
            await asyncio.sleep(self._busy_until[gateway] - loop.time())
        return await self._receive(self._pools[gateway % len(self._pools)], requests, [prompt], found)

    def _begun(self, found: Answered) -> None:
        """The first token of an answer has come."""

    async def _receive(
        self,
        pool: EnginePool,
        requests: Sequence[pb.GenerateRequest],
        prompts: Sequence[Sequence[int]],
        found: Sequence[Answered],
    ) -> list[int] | None:
        loop = asyncio.get_running_loop()
        answer: list[int] = []
        try:
            async with pool.request_group(requests, Affinity(), prompts=prompts) as group:
                async for index, update in group:
                    one = found[index]
                    if index == 0:
                        answer += update.token_ids
                    if one.first is None:
                        one.first, one.cached, one.version = loop.time(), update.cached_tokens, update.adapter
                        self._begun(one)
                    if update.finish_reason:
                        one.end, one.tokens = loop.time(), requests[index].sampling.max_tokens
        except TemperError as error:
            for one in found:
                if one.end is None:
                    one.error = str(error)
            return None
        return answer


def _request(session: Session, turn: Turn, name: str, output: int, prompt: list[int]) -> pb.GenerateRequest:
    adapter = pb.AdapterRef(base=True)
    if session.adapter:
        adapter = pb.AdapterRef(named=pb.NamedAdapter(name=session.adapter))
    sampling = pb.SamplingParams(max_tokens=output, ignore_eos=True, seed=turn.answer, temperature=1.0, top_p=1.0)
    return pb.GenerateRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling, adapter=adapter)


Event = tuple[float, Callable[[], Awaitable[None]]]
"""What happens to a fleet, seconds after the trace's begin."""


async def happen(events: Sequence[Event]) -> None:
    """Lets events happen at their times."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    for when, call in sorted(events, key=lambda event: event[0]):
        await asyncio.sleep(max(0.0, began + when - loop.time()))
        await call()
