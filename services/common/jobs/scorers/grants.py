"""What the operator lets scorers of jobs use beside the completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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
class Grants:
    """The same in the engine."""

    webhooks: Webhooks = field(default_factory=Webhooks)
    sandbox: Sandbox | None = None
    """None: programs of answers are not run."""

    @property
    def granted(self) -> Granted:
        """What gateways are told."""
        return Granted(self.webhooks.allowed, self.webhooks.secret is not None, self.sandbox is not None)
