"""The newest policy of a job, for rollouts that are under way when the trainer takes a step."""

from __future__ import annotations

from dataclasses import dataclass

from services.engine.models.lora.trainable import LoraParams


@dataclass(frozen=True, slots=True)
class PolicyAt:
    """A policy and how far it is trained."""

    version: float
    """Rounds that it has been trained on; a fraction while a round's steps are taken."""
    lora: LoraParams
    """Copy that nobody changes."""


class NewestPolicy:
    """Hands policies from the trainer's thread to the one that samples."""

    def __init__(self) -> None:
        # One reference, replaced as a whole: neither thread waits for the other.
        self._newest: PolicyAt | None = None

    def offer(self, policy: PolicyAt) -> None:
        """This is the newest from now on."""
        self._newest = policy

    def after(self, version: float) -> PolicyAt | None:
        """The newest, if it is newer than ``version``."""
        newest = self._newest
        return newest if newest is not None and newest.version > version else None
