"""`curriculum`: which prompts the rounds of a job take, by how often they have been answered well."""

from __future__ import annotations

from pydantic import Field, model_validator

from services.common.validation.strict_models import SentModel


class Curriculum(SentModel):
    """Each round draws its prompts without repeats. A prompt whose success is inside of the band, or not known yet, has
    the weight 1 in the draw, any other one the weight `outside`."""

    low: float = Field(0.1, ge=0, le=1)
    """Success below which a prompt is too hard for now: all of its completions fail, and nothing is learnt of them."""
    high: float = Field(0.9, ge=0, le=1)
    """Success above which it is learnt."""
    outside: float = Field(0.1, gt=0, le=1)
    """Weight of a prompt outside of the band: never 0, so that what is forgotten, or has come into reach, is seen."""
    success_at: float = Field(1.0, ge=-1e9, le=1e9)
    """Reward from which on a completion, or an episode, is a success: the sum of all rewards with their weights."""
    newest: float = Field(0.5, gt=0, le=1)
    """Weight of the newest round in the success of a prompt; the earlier ones have the rest. 1: it alone counts."""

    @model_validator(mode="after")
    def _band(self) -> Curriculum:
        if self.low > self.high:
            raise ValueError(f"low is {self.low:g} and high {self.high:g}: low must not be over high")
        return self
