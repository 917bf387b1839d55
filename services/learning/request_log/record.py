"""One logged request: what was asked, what each choice answered, by which version, and how long it took."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict
from pydantic_core import from_json

from services.common.storage.record_versions import LOGGED_REQUEST
from services.common.validation.strict_models import StrictModel


class LoggedChoice(StrictModel):
    """One answer."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    completion_id: str
    version: str | None = None
    """Adapter version ("name@n") that answered; null: the model without adapter."""
    message: dict[str, Any] | None = None
    """The assistant's message; of a text completion its text as `content`."""
    finish_reason: str | None = None
    """null: the client left, or the engine failed, before its end."""
    tokens: int = 0
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    """Log-probability of each token under the distribution that it was drawn from."""


class LoggedRequest(StrictModel):
    """A request with its answers. What redaction left out is null or absent."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    also: tuple[str, ...] = ()
    """Other ids of its answer: that of a response."""
    at: float
    """Unix seconds at which it ended."""
    owner: str = ""
    """Id of the API key that sent it; empty: there are no keys."""
    kind: Literal["chat", "text"]
    model: str
    """`model` of the request."""
    user: str | None = None
    session: str | None = None
    metadata: dict[str, str] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    prompt: str | list[Any] | None = None
    sampling: dict[str, Any] | None = None
    """What the request set of sampling and limits."""
    prompt_tokens: int = 0
    prompt_token_ids: list[list[int]] | None = None
    """Of each prompt."""
    choices: tuple[LoggedChoice, ...]
    first_token_seconds: float | None = None
    seconds: float = 0.0
    redacted: tuple[str, ...] = ()
    """Names of the patterns that were found; then it has no token ids either."""

    @classmethod
    def parse(cls, line: bytes, where: str) -> LoggedRequest:
        """A request of a line of a part. Raises NewerSchema."""
        with LOGGED_REQUEST.reading(where):
            return cls.model_validate(LOGGED_REQUEST.unstamped(from_json(line), where))

    def choice(self, completion_id: str) -> LoggedChoice | None:
        """The choice with this id; the only one, if the id is that of the whole answer."""
        for one in self.choices:
            if one.completion_id == completion_id:
                return one
        return self.choices[0] if completion_id in (self.id, *self.also) and len(self.choices) == 1 else None
