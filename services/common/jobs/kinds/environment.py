"""Settings of an environment that rollouts act in: an OpenEnv server, or tools that are called over HTTP."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from services.common.errors import InvalidRequest
from services.common.jobs.scorers.allowed_webhooks import check_covered, check_webhook
from services.common.jobs.scorers.base import ScorerSettings
from services.common.jobs.scorers.grants import Granted
from services.common.jobs.scorers.webhook import WebhookUrl
from services.common.validation.json_rules import NOT_NULL, SOME, Rules, both, either, has, if_any, left_out
from services.common.validation.strict_models import SentModel

OBSERVATION = "{observation}"
"""Stands in a prompt's last message for what the environment shows at the reset."""


class FailureKind(enum.StrEnum):
    """Kinds of failures of an environment."""

    TIMEOUT = "timeout"
    CONNECTION = "connection"
    """It cannot be reached, or the connection broke."""
    PROTOCOL = "protocol"
    """What it said is no JSON, or not of the form that it should be."""
    OVERSIZED = "oversized"
    """What it said is too long."""
    CAPACITY = "capacity"
    """It has no room for another session."""
    ERROR = "error"
    """It says itself that something is wrong with it."""


FAILURES = {kind: f"environment_failures_{kind.value}" for kind in FailureKind}
"""Metric of a step → how many environments failed so while it played."""
DROPPED = "environment_dropped"
"""Metric of a step: its episodes that no environment brought to their end."""


class HttpTool(SentModel):
    """A tool that the model may call: the arguments of a call are posted to its URL, what comes back is read."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str = Field("", max_length=4000)
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON Schema of the arguments. A call with others is not sent: the model reads what is wrong with it."""
    url: WebhookUrl
    """Must be covered by TEMPER_REWARD_WEBHOOKS of the engine that runs the job."""

    @property
    def definition(self) -> dict[str, Any]:
        """Function definition, as the chat template renders it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class EnvironmentReward(ScorerSettings):
    """Each completion is an episode: the policy acts, reads what comes of it, and acts again. The score is the sum of
    the environment's rewards; see docs/guides/training/environments.md."""

    type: Literal["environment"] = "environment"
    weight: float = Field(1.0, ge=-1e6, le=1e6)
    """The environment's rewards count times this."""
    url: WebhookUrl | None = None
    """OpenEnv server, without the /ws of its WebSocket; must be covered by TEMPER_REWARD_WEBHOOKS of the engine that
    runs the job."""
    tools: list[HttpTool] | None = Field(None, min_length=1, max_length=64)
    """Tools over HTTP instead of a server. They give no reward: another one reads the last answer."""
    message_field: str | None = Field("message", min_length=1, max_length=100)
    """Field of the action that an answer without a call of a tool becomes. null: such an answer ends the episode."""
    observation_field: str | None = Field(None, min_length=1, max_length=100)
    """Field of an observation that the policy reads. null: `text`, `message`, `result` or `error` if it has one of
    them, else all of it as JSON."""
    max_turns: int = Field(8, ge=1, le=1000)
    """Answers of one episode."""
    max_trajectory_tokens: int | None = Field(None, ge=2)
    """Most tokens of one episode, its prompt and all observations included; one that would be longer is cut off. null:
    what the engine trains on."""
    timeout_seconds: float = Field(30.0, gt=0, le=3600)
    """Time for one answer of the environment or a tool."""
    concurrency: int = Field(32, ge=1, le=1024)
    """Episodes under way at once, each with an environment of its own."""
    attempts: int = Field(2, ge=1, le=20)
    """Environments that an episode may try, each from the beginning. If the last one fails, too, the episode is
    dropped: nothing of it is learnt."""
    max_dropped: float = Field(0.5, ge=0, lt=1)
    """Share of a round's episodes that may be dropped; if more are, the job ends with the reason."""
    success_at: float = Field(1.0, ge=-1e9, le=1e9)
    """Score of the environment from which on an episode counts as a success in the metrics."""

    json_rules: ClassVar[Rules] = (
        either(
            both(has(url=NOT_NULL), left_out("tools")),
            # What would do nothing has its default.
            both(
                has(tools=SOME),
                left_out("url", "observation_field"),
                if_any(weight=1, message_field="message", success_at=1),
            ),
        ),
    )

    @model_validator(mode="after")
    def _consistent(self) -> EnvironmentReward:
        if (self.url is None) == (self.tools is None):
            raise ValueError("give one of url, tools")
        names = [tool.name for tool in self.tools or ()]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"tools has {twice[0]!r} twice")
        if self.tools is not None:
            for field, way_out in (
                ("weight", "tools give no reward: weigh the one that reads the last answer"),
                ("success_at", "tools give no reward, so there is no success"),
                ("message_field", "an answer without a call is the last, and goes nowhere"),
                ("observation_field", "what a tool answers is read as it is"),
            ):
                if getattr(self, field) != type(self).model_fields[field].default:
                    raise ValueError(f"{field} would do nothing here: {way_out}")
        return self

    @property
    def definitions(self) -> list[dict[str, Any]] | None:
        """Definitions of its tools for the prompt; None: the prompts have their own, or none."""
        return None if self.tools is None else [tool.definition for tool in self.tools]

    def check(self, where: str, answers: Iterable[tuple[str, str | None]]) -> None:
        """See ScorerSettings: the schemas of its tools are compiled."""
        del answers
        check_tools(self.definitions or (), f"{where}.tools")

    def check_allowed(self, where: str, granted: Granted) -> None:
        """See ScorerSettings."""
        if self.url is not None:
            check_covered(self.url, where, granted.prefixes)
        for index, tool in enumerate(self.tools or ()):
            check_webhook(tool.url, f"{where}.tools[{index}]", granted.prefixes, signed=granted.signed)


def check_tools(definitions: Sequence[dict[str, Any]], where: str) -> None:
    """Compiles the schema of each tool's arguments. Calls are told by their names, and arguments are an object.

    Raises:
        InvalidRequest: one cannot be used; it is named.
    """
    # Needs the schemas' library, which clients that only write jobs do not have.
    from services.common.jobs.scorers.json_schema import SchemaRefused, compiled

    names: set[str] = set()
    for index, definition in enumerate(definitions):
        param = f"{where}[{index}]"
        function = definition.get("function", definition)
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name:
            raise InvalidRequest(f"{param} is no definition of a function: give it a name", param=param)
        if name in names:
            raise InvalidRequest(f"{param}: two tools have the name {name[:64]!r}: rename one of them", param=param)
        names.add(name)
        param = f"{param}.parameters"
        schema = function.get("parameters", {})
        schema = {} if schema is None else schema
        if not isinstance(schema, dict) or "object" not in schema.get("type", "object"):
            raise InvalidRequest(
                f'{param}: arguments are an object: let the type be "object", or say none', param=param
            )
        try:
            compiled(schema)
        except SchemaRefused as error:
            raise InvalidRequest(f"{param} cannot be used: {error}", param=param) from error
