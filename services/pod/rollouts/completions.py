"""Requests for completions as the engine takes them, and what it says as completions."""

from __future__ import annotations

from array import array
from dataclasses import replace

from services.engine.requests.adapter import AdapterChoice, PrivateVersion
from services.engine.requests.outputs import Finished
from services.engine.requests.request import FinishReason
from services.engine.requests.sampling_params import SamplingParams
from services.engine.requests.submission import Submission
from services.trainer.host.rollouts import Completion, RolloutRequest, RolloutSampling

PRIORITY = 2**31
"""Priority behind everything that a protobuf int32 can ask for."""
_NOTHING = Completion((), array("f"), truncated=False, cut=True)


def sampled(
    name: str, request: RolloutRequest, sampling: RolloutSampling, adapter: AdapterChoice | PrivateVersion
) -> Submission:
    """The request of a completion; what is begun of it is read with the prompt."""
    begun = () if request.begun is None else request.begun.token_ids
    return Submission(
        name,
        (*request.prompt, *begun),
        SamplingParams(
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens - len(begun),
            stop_token_ids=sampling.stop_token_ids,
            top_p=sampling.top_p,
            seed=request.seed,
        ),
        adapter,
        priority=PRIORITY,
        background=True,
    )


def completion_of(request: RolloutRequest, finished: Finished | None) -> Completion:
    """The completion with what was begun of it; None: it was cut before its first step."""
    begun = _NOTHING if request.begun is None else request.begun
    if finished is None:
        return replace(begun, cut=True)
    return Completion(
        (*begun.token_ids, *finished.output_ids),
        begun.logprobs + array("f", finished.sampling_logprobs),
        truncated=finished.finish_reason is FinishReason.LENGTH,
        cut=finished.finish_reason is FinishReason.ABORT,
        versions=begun.versions,
    )
