"""Scorer that asks a service of the operator's; `webhook_client` sends the samples."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from services.common.jobs.scorers.allowed_webhooks import check_webhook, webhook_parts
from services.common.jobs.scorers.base import ScorerSpec
from services.common.jobs.scorers.grants import Granted, Grants
from services.common.jobs.scorers.sample import Scorer

_URL = r'^https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{0,5})?([/?][!"$-\[\]-~]*)?$'
"""Pattern of the URLs that ``webhook_parts`` takes, as far as a pattern can say it."""
URL_SCHEMA = {"pattern": _URL}


def _plain(url: str) -> str:
    webhook_parts(url)
    return url


WebhookUrl = Annotated[str, Field(max_length=2000, json_schema_extra=dict(URL_SCHEMA)), AfterValidator(_plain)]
"""URL that everybody reads alike."""


class WebhookReward(ScorerSpec):
    """The score is what a service of yours answers; see docs/guides/training.md."""

    type: Literal["webhook"] = "webhook"
    url: WebhookUrl
    """Must be covered by TEMPER_REWARD_WEBHOOKS of the engine that runs the job."""

    def check_allowed(self, where: str, granted: Granted) -> None:
        """See ScorerSpec."""
        check_webhook(self.url, where, granted.prefixes, signed=granted.signed)

    def scorer(self, where: str, grants: Grants) -> Scorer:
        """See ScorerSpec."""
        from services.common.jobs.scorers.webhook_client import WebhookScorer

        return WebhookScorer(grants.webhooks, self.url, where)
