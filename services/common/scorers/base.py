"""How a job scores what it sampled: the part of its request. Scoring is the trainer's (services/trainer/rewards).

What can be checked without a pattern engine is checked here; the rest in services/common/scorers/json_schema.py.
"""

from __future__ import annotations

import math
import urllib.parse
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from services.common.jobs.base import SentModel
from services.common.validation.json_rules import Rules

MAX_PATTERN = 2000
_URL = r'^https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{0,5})?([/?][!"$-\[\]-~]*)?$'
"""What ``webhook_parts`` takes, as far as a pattern can say it."""
ANSWER = "{answer}"
"""In a pattern: stands for the prompt's answer, taken literally."""


class RewardBase(SentModel):
    weight: float = Field(1.0, ge=-1e6, le=1e6)
    """The completion's reward is the sum of weight times score."""

    json_rules: ClassVar[Rules] = ({"required": ["type"]},)
    """In a request: it says which reward it is."""

    @property
    def needs_answer(self) -> bool:
        """Whether every prompt must have an answer."""
        return False


class RegexReward(RewardBase):
    """1 if the pattern (RE2 syntax) matches, else 0."""

    type: Literal["regex"] = "regex"
    pattern: str = Field(min_length=1, max_length=MAX_PATTERN)
    """`{answer}` stands for the prompt's answer, literally."""
    match: Literal["search", "full"] = "search"
    """search: anywhere in the completion; full: the whole of it."""

    @property
    def needs_answer(self) -> bool:
        return ANSWER in self.pattern


class ExactReward(RewardBase):
    """1 if the completion is the prompt's answer, else 0."""

    type: Literal["exact"] = "exact"
    strip: bool = True
    """Without white space at both ends, of both."""
    ignore_case: bool = False

    @property
    def needs_answer(self) -> bool:
        return True


class NumericReward(RewardBase):
    """1 if the last number of the completion is the prompt's answer within the tolerance, else 0."""

    type: Literal["numeric"] = "numeric"
    tolerance: float = Field(1e-6, ge=0)
    """Largest absolute difference."""
    relative_tolerance: float = Field(0.0, ge=0, lt=1)
    """Largest difference as a share of the answer; the wider of the two holds."""

    @property
    def needs_answer(self) -> bool:
        return True


class JsonSchemaReward(RewardBase):
    """1 if the completion is JSON and valid against the schema, else 0."""

    type: Literal["json_schema"] = "json_schema"
    json_schema: dict[str, Any]
    """Draft 2020-12 unless it names another. `$ref` only to its own definitions, and without recursion."""


class WebhookReward(RewardBase):
    """The score is what a service of yours answers; see docs/guides/training.md."""

    type: Literal["webhook"] = "webhook"
    url: str = Field(max_length=2000, json_schema_extra={"pattern": _URL})
    """Must be covered by TEMPER_REWARD_WEBHOOKS of the engine that runs the job."""

    @field_validator("url")
    @classmethod
    def _plain(cls, url: str) -> str:
        webhook_parts(url)
        return url


RewardSpec = Annotated[
    RegexReward | ExactReward | NumericReward | JsonSchemaReward | WebhookReward, Field(discriminator="type")
]


def answer_number(answer: str) -> float | None:
    """The number that an answer is, None if it is none: "1,234.5", " 7 ", "-2e3"."""
    try:
        value = float(answer.strip().replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def webhook_parts(url: str) -> tuple[str, str, int, str]:
    """Scheme, host, port and path of a URL that means the same to everybody who reads it.

    Raises:
        ValueError: it is no plain http or https URL; anything that parsers read differently is refused.
    """
    if not url.isascii() or any(ord(character) <= 0x20 or ord(character) == 0x7F for character in url) or "\\" in url:
        raise ValueError("a URL has visible ASCII characters only and no backslash")
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("a URL begins with https:// or http:// and a host")
    if "@" in parts.netloc or parts.fragment or "#" in url:
        raise ValueError("a URL has no user, password or fragment")
    segments = urllib.parse.unquote(parts.path).split("/")
    if any(segment in (".", "..") for segment in segments) or "%2f" in parts.path.lower() or "%5c" in url.lower():
        raise ValueError("the path of a URL has no . or .. and no encoded slash")
    try:
        port = parts.port
    except ValueError as error:
        raise ValueError(f"the port of a URL is a number up to 65535: {error}") from error
    return parts.scheme, parts.hostname, port or (443 if parts.scheme == "https" else 80), parts.path or "/"
