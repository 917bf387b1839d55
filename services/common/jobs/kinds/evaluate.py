"""An evaluation: its request. It answers the items of suites by several targets, and makes no version of an adapter."""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias

from pydantic import Field, field_validator, model_validator

from services.common.adapters.names import BASE
from services.common.jobs.fields.gates import MAX_SUITES
from services.common.jobs.fields.refs import Policy, SuiteRef
from services.common.jobs.scorers.allowed_webhooks import webhook_parts
from services.common.jobs.scorers.webhook import URL_SCHEMA
from services.common.validation.errors import contradiction
from services.common.validation.strict_models import SentModel

MAX_TARGETS = 8
MAX_SAMPLES = 256


class RemoteTarget(SentModel):
    """A model of another server that has OpenAI's API, to compare with. The engine that runs the job sends
    the key that its TEMPER_TARGET_KEYS has for the URL; jobs hold none."""

    url: str = Field(max_length=2000, json_schema_extra=dict(URL_SCHEMA))
    """The server's base URL, e.g. http://other:8000/v1. Must be covered by TEMPER_REWARD_WEBHOOKS of the engine that
    runs the job."""
    model: str = Field(min_length=1, max_length=200)

    @field_validator("url")
    @classmethod
    def _plain(cls, url: str) -> str:
        webhook_parts(url)
        return url

    def __str__(self) -> str:
        return f"{self.model} at {self.url}"


Target: TypeAlias = Policy | RemoteTarget


def _base_alone() -> list[Target]:
    return [BASE]


class EvalSampling(SentModel):
    """Sampling of the answers where it is to differ from what the suites say; what is left out is as they say."""

    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    samples: int | None = Field(None, ge=1, le=MAX_SAMPLES)
    """Answers of each item."""


class EvalJob(SentModel):
    """Evaluates targets on suites: every item is answered by every target, scored, and targets are compared in pairs.

    Answers are stored as they come, so that a run goes on where it was after a restart.
    """

    kind: Literal["eval"] = "eval"
    suites: list[SuiteRef] = Field(min_length=1, max_length=MAX_SUITES)
    """Suites to run, each "name" or "name@n"."""
    targets: list[Target] = Field(default_factory=_base_alone, min_length=1, max_length=MAX_TARGETS)
    """Models to compare: "base", versions of adapters, several adapters together ("a@3*0.7+b"), or models of other
    servers."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the samples: the same run gives the same answers."""
    sampling: EvalSampling = EvalSampling()
    metadata: dict[str, str] = Field(default_factory=dict)

    adapter: ClassVar[str] = ""
    """No adapter gets a version, so that no job of an adapter waits for this one."""

    @model_validator(mode="after")
    def _no_twins(self) -> EvalJob:
        for field, names in (("suites", self.suites), ("targets", [str(target) for target in self.targets])):
            for name in names:
                if names.count(name) > 1:
                    message = f"{name} is among the {field} more than once: leave it out"
                    raise contradiction(message, field)
        return self
