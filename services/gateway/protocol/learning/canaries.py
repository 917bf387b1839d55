"""Bodies of /v1/canaries."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Path
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from services.common.adapters.names import VERSION_SCHEMA, parse_adapter_version
from services.common.storage.names import field_check
from services.common.validation.strict_models import SentModel
from services.gateway.protocol.fields.listing import Listing
from services.learning.canaries.policy import CanaryPolicy
from services.learning.canaries.record import ID_PATTERN, CanaryEvidence, CanaryRecord, Decision, State

CanaryPath = Annotated[str, Path(pattern=ID_PATTERN)]
_Version = Annotated[str, field_check(parse_adapter_version), WithJsonSchema({"type": "string", **VERSION_SCHEMA})]


class CanaryRequest(SentModel):
    """POST /v1/canaries: a version that is to answer a share of the requests."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    version: _Version
    """"name@n": compared with the adapter's current version, or without one with the base model."""
    policy: CanaryPolicy = CanaryPolicy()


class DecisionRequest(SentModel):
    """POST /v1/canaries/{id}/decide: a person's decision."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    decision: Literal["promote", "roll_back"]
    reason: str = Field("", max_length=1024)
    """Kept with the decision."""


class CanaryObject(BaseModel):
    """A version that answers a share of the requests, or did."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str = Field(pattern=ID_PATTERN)
    object: Literal["canary"] = "canary"
    adapter: str
    current: str
    """Version that it is compared with: "name@n", or "base"."""
    candidate: str
    attached: bool
    """True if requests for the base model's name take part."""
    policy: CanaryPolicy
    state: State
    key_id: str
    """Id of the API key that began it."""
    origin: str
    """Learner that began it; empty: a person did."""
    began_at: float
    """Unix seconds."""
    ended_at: float | None
    evidence: CanaryEvidence | None
    """The newest look; once it is decided, what the decision rests on."""
    decision: Decision | None

    @classmethod
    def of(cls, record: CanaryRecord) -> CanaryObject:
        """A canary as the API tells it."""
        return cls(
            id=record.id,
            adapter=record.adapter,
            current=record.current,
            candidate=record.candidate,
            attached=record.attached,
            policy=record.policy,
            state=record.state,
            key_id=record.owner,
            origin=record.origin,
            began_at=record.began_at,
            ended_at=record.ended_at,
            evidence=record.evidence,
            decision=record.decision,
        )


class CanaryList(Listing):
    """A page of canaries, newest first."""

    object: Literal["list"] = "list"
    data: list[CanaryObject]
    has_more: bool
