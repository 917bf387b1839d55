"""Drawing a sample: Tinker's request becomes a completion of tokens, and what the engines answer their message."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from contextlib import aclosing

from services.common.errors import InvalidRequest
from services.common.pb import tinker_pb2 as pb
from services.gateway.api.training.tinker.bodies import Sample, checked
from services.gateway.core.admission import Reservation
from services.gateway.inference.choice import Step
from services.gateway.inference.context import InferenceContext
from services.gateway.inference.generation import Generation, PromptSpec
from services.gateway.inference.logprobs import PromptLogprobs, TokenLogprob, check_size
from services.gateway.inference.prompts import token_budget
from services.gateway.protocol.completions import CompletionRequest

_MASKED = -99999.0
"""Log-probability in Tinker's matrices where there is none; the token is 0."""


def completion_of(body: Sample, policy: str, model: str) -> CompletionRequest:
    """The completion that a sample is.

    Raises:
        InvalidRequest: something is wrong with it.
    """
    prompt, params = body.prompt.tokens, body.sampling_params
    if not prompt:
        raise InvalidRequest("the prompt has no tokens", param="prompt")
    if body.prompt_logprobs_last_n is not None and (
        not body.prompt_logprobs or body.prompt_logprobs_last_n >= len(prompt)
    ):
        raise InvalidRequest(
            "prompt_logprobs_last_n goes with prompt_logprobs, and is less than the prompt is long",
            param="prompt_logprobs_last_n",
        )
    stop = [params.stop] if isinstance(params.stop, str) else params.stop or []
    texts = [each for each in stop if isinstance(each, str)]
    wants_prompt = body.prompt_logprobs or body.topk_prompt_logprobs
    return checked(
        CompletionRequest,
        {
            "model": model,
            "adapter": policy,
            "prompt": prompt,
            "n": body.num_samples,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "seed": params.seed,
            "stop": texts or None,
            "stop_token_ids": [each for each in stop if isinstance(each, int)] or None,
            # An empty list stops nothing, not even at the model's own end.
            "ignore_eos": params.stop is not None and not stop,
            "return_token_ids": True,
            "logprobs": body.topk_sample_logprobs or None,
            "prompt_logprobs": body.topk_prompt_logprobs if wants_prompt else None,
        },
    )


async def draw(
    context: InferenceContext, body: Sample, completion: CompletionRequest, reservation: Reservation, traceparent: str
) -> bytes:
    """The samples as SampleResponse; gives the places back.

    Raises:
        TemperError: it is refused, or the engine did not finish it.
    """
    try:
        served, prompt = context.engines.served, body.prompt.tokens
        room = served.info.max_model_len
        budget = token_budget(len(prompt), completion.max_tokens, default=room, context=room, field="prompt")
        if completion.prompt_logprobs is not None:
            limit = context.settings.max_prompt_logprobs
            check_size(len(prompt), completion.prompt_logprobs, limit=limit, field="topk_prompt_logprobs")
        generation = Generation(
            context,
            served,
            completion,
            [PromptSpec(prompt, budget)],
            prefix="cmpl",
            top_logprobs=completion.logprobs,
            chat=False,
            prompt_logprobs=completion.prompt_logprobs,
            shows_end=True,
            traceparent=traceparent,
        )
        collected: list[list[Step]] = [[] for _ in generation.choices]
        async with aclosing(generation.steps()) as steps:
            async for step in steps:
                collected[step.choice.index].append(step)
        scores = generation.prompt_scores(generation.choices[0])
        return _response(body, generation, collected, scores).SerializeToString()
    finally:
        reservation.release()


def _response(
    body: Sample, generation: Generation, collected: Sequence[Sequence[Step]], scores: PromptLogprobs
) -> pb.SampleResponse:
    response = pb.SampleResponse(prompt_cache_hit_tokens=generation.choices[0].cached_tokens)
    for steps in collected:
        tokens = [token for step in steps for token in step.token_ids]
        length = bool(steps) and steps[-1].finish_reason == "length"
        sequence = response.sequences.add(
            stop_reason=pb.STOP_REASON_LENGTH if length else pb.STOP_REASON_STOP,
            tokens=array("i", tokens).tobytes(),
            logprobs=array("f", (value for step in steps for value in step.sampling_logprobs)).tobytes(),
        )
        if body.topk_sample_logprobs:
            entries: list[TokenLogprob] = [entry for step in steps for entry in step.piece.entries]
            rows = [(entry.top_ids, entry.top_logprobs) for entry in entries[: len(tokens)]]
            rows += [((), ())] * (len(tokens) - len(rows))
            sequence.topk_sampled_logprobs.CopyFrom(_matrix(rows, body.topk_sample_logprobs))
    prompt = body.prompt.tokens
    first = max(1, len(prompt) - (body.prompt_logprobs_last_n or len(prompt)))
    if body.prompt_logprobs:
        told = [math.nan] * first + scores.logprobs[first - 1 :]
        response.prompt_logprobs = array("f", told).tobytes()
    if body.topk_prompt_logprobs:
        told_rows: list[tuple[Sequence[int], Sequence[float]]] = [((), ())] * first
        told_rows += [
            (scores.top_ids(place), scores.top_logprobs(place)) for place in range(first - 1, len(prompt) - 1)
        ]
        response.topk_prompt_logprobs.CopyFrom(_matrix(told_rows, body.topk_prompt_logprobs))
    return response


def _matrix(rows: Sequence[tuple[Sequence[int], Sequence[float]]], width: int) -> pb.TopkLogprobs:
    ids, logprobs = array("i"), array("f")
    for row_ids, row_logprobs in rows:
        missing = width - len(row_ids[:width])
        ids.extend([*row_ids[:width], *[0] * missing])
        logprobs.extend([*row_logprobs[:width], *[_MASKED] * missing])
    return pb.TopkLogprobs(token_ids=ids.tobytes(), logprobs=logprobs.tobytes(), k=width, length=len(rows))
