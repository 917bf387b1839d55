"""What scorers of jobs use beside the completions: what the operator lets them use, and the engine as a judge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from services.common.adapters.composition import Published
from services.common.jobs.scorers.allowed_webhooks import Webhooks
from services.common.security.sandbox.sandbox import Sandbox


@dataclass(frozen=True, slots=True)
class Granted:
    """What an engine lets scorers use, as gateways know it."""

    prefixes: Sequence[str] = ()
    """URL prefixes that the engine may send samples to."""
    signed: bool = False
    """Whether the engine has a secret to sign requests to webhooks with."""
    sandbox: bool = False
    """Whether the engine runs programs of answers."""


@dataclass(frozen=True, slots=True)
class JudgeQuestion:
    """One question to a judge, and the verdicts that answer it."""

    prompt: str
    verdicts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class JudgeReply:
    """Log-probability of each verdict as the answer to a question, in nats; or why it could not be asked."""

    logprobs: Mapping[str, float]
    refused: str | None = None


AskJudge: TypeAlias = Callable[[Published | None, Sequence[JudgeQuestion], Callable[[], None]], Sequence[JudgeReply]]
"""Asks a version of an adapter, or several together (None: the base), these questions; calls the last argument now
and then, which may raise. Raises ModelNotFound: the version does not exist; Unavailable: the engine does not answer."""


@dataclass(frozen=True, slots=True)
class Grants:
    """The same in the engine."""

    webhooks: Webhooks = field(default_factory=Webhooks)
    sandbox: Sandbox | None = None
    """None: programs of answers are not run."""
    judge: AskJudge | None = None
    """None: there is no engine to ask."""

    @property
    def granted(self) -> Granted:
        """What gateways are told."""
        return Granted(self.webhooks.allowed, self.webhooks.secret is not None, self.sandbox is not None)
