"""What a scripted engine says of prompts: numbers that a test can compute again."""

from __future__ import annotations

from services.common.pb import engine_pb2
from tests.unit.gateway.fake_engine import Behaviour, FakeEngine, Send, says

WIDTH = 5


def logprob(token: int, place: int) -> float:
    """Of a prompt's token at its place: exact in 32 bits."""
    return -(token % 16) / 4 - place / 64


def rank(token: int) -> int:
    """1 for letters up to "m"."""
    return 1 if token <= ord("m") else 5


def top_ids(token: int, count: int) -> list[int]:
    """The token itself first, if it is likeliest."""
    others = [other for other in range(65, 65 + count) if other != token]
    return ([token, *others] if rank(token) == 1 else others)[:count]


def vector(prompt: list[int], pooling: engine_pb2.Pooling) -> list[float]:
    """Not normalised."""
    last = prompt[-1] if pooling == engine_pb2.POOLING_LAST else sum(prompt)
    return [float(last), float(len(prompt)), *range(WIDTH - 2)]


def reads(then: Behaviour | None = None, *, part: int = 3) -> Behaviour:
    """Says what is asked of the prompt, ``part`` tokens an update, then answers."""
    answer = says("Hello, world") if then is None else then

    async def behave(engine: FakeEngine, request: engine_pb2.GenerateRequest, send: Send) -> None:
        prompt = list(request.prompt_token_ids)
        name, first = request.request_id, {"adapter": engine.adapter_of(request), "cached_tokens": engine.cached_tokens}
        if request.HasField("prompt_logprobs"):
            places = range(max(1, request.prompt_logprobs_from), len(prompt))
            for begin in range(0, len(places), part):
                some = places[begin : begin + part]
                tops = [top_ids(prompt[place], request.prompt_logprobs) for place in some]
                told = engine_pb2.PromptLogprobs(
                    logprobs=[logprob(prompt[place], place) for place in some],
                    ranks=[rank(prompt[place]) for place in some],
                    top_token_ids=[token for ids in tops for token in ids],
                    top_logprobs=[
                        logprob(prompt[place], place) if token == prompt[place] else -8.0 - number
                        for place, ids in zip(some, tops, strict=True)
                        for number, token in enumerate(ids)
                    ],
                )
                await send(engine_pb2.Update(request_id=name, prompt_logprobs=told, **first))
                first = {}
        if request.pooling:
            embedding = vector(prompt, request.pooling)
            await send(engine_pb2.Update(request_id=name, embedding=embedding, **first))
        await answer(engine, request, send)

    return behave
