"""Submission: a request before its adapter is pinned. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.common.errors import InvalidRequest
from services.engine.requests.adapter import AdapterChoice, AdapterPin, PrivateVersion
from services.engine.requests.conversation_session import SessionName, check_session
from services.engine.requests.outputs import SequenceUpdate
from services.engine.requests.request import Pooling, Request, TokenMatcher, check_boundaries, check_prompt_logprobs
from services.engine.requests.sampling_params import SamplingParams

Sink = Callable[[list[SequenceUpdate]], None]
"""Sink: called with the updates of one step for all requests that were submitted with it. It runs on the loop thread,
so it only hands them on (loop.call_soon_threadsafe) and never blocks. Sinks are compared by equality."""


@dataclass(frozen=True, slots=True)
class Submission:
    """Submission: a request whose adapter is not pinned yet. The loop thread pins it between two steps."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    adapter: AdapterChoice | PrivateVersion
    deadline: float | None = None
    """Deadline on the loop's clock (time.monotonic), seconds."""
    cache_salt: str = ""
    priority: int = 0
    """Priority; lower runs first."""
    keep_rollout: bool = False
    owner: str = ""
    """Id of the API key that may train on the kept rollout; empty: there are no keys."""
    background: bool = False
    """True for a request of this process itself: it takes no place in the queue and is in no latency metric. Its
    submitter bounds their number."""
    prompt_logprobs: int | None = None
    """See Request."""
    prompt_logprobs_from: int = 0
    pooling: Pooling | None = None
    matcher: TokenMatcher | None = None
    """See Request.matcher; made by ConstraintCompiler before the request is submitted."""
    traceparent: str = ""
    """See Request."""
    session: SessionName | None = None
    """See Request."""
    boundaries: tuple[int, ...] = ()
    """See Request."""

    def __post_init__(self) -> None:
        if not self.request_id:
            raise InvalidRequest("request_id must not be empty", param="request_id")
        if not self.prompt_token_ids:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        check_prompt_logprobs(self.prompt_logprobs, self.prompt_logprobs_from, len(self.prompt_token_ids))
        if self.session is not None:
            check_session(self.session)
        check_boundaries(self.boundaries, len(self.prompt_token_ids))

    def pinned(self, pin: AdapterPin, arrival: int) -> Request:
        """Request for the scheduler, with its pin."""
        return Request(
            self.request_id,
            self.prompt_token_ids,
            self.sampling,
            pin,
            self.deadline,
            self.cache_salt,
            self.priority,
            arrival,
            self.prompt_logprobs,
            self.prompt_logprobs_from,
            self.pooling,
            self.matcher,
            self.traceparent,
            self.session,
            self.boundaries,
        )
