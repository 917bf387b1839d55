"""Where a job may send its samples: one rule for the gateway, which refuses the job, and the trainer, which sends."""

from __future__ import annotations

from collections.abc import Sequence

from services.common.errors import InvalidRequest
from services.common.scorers.base import webhook_parts


def check_webhook(url: str, where: str, allowed: Sequence[str], *, signed: bool) -> None:
    """Checks a webhook against what an engine allows.

    Args:
        where: place of the reward in the job.
        allowed: URL prefixes, each with its scheme.
        signed: the engine has a secret to sign requests with.

    Raises:
        InvalidRequest: the engine may not send there.
    """
    param = f"{where}.url"
    if not any(_covers(entry, url) for entry in allowed):
        raise InvalidRequest(
            f"{param}: {url!r} is not covered by TEMPER_REWARD_WEBHOOKS of the engine that would call it, which lists "
            f"{', '.join(allowed) or 'nothing'}: have a prefix of the URL listed there (in every engine that trains), "
            "or give a reward that the engine computes itself",
            param=param,
        )
    if not signed:
        raise InvalidRequest(
            f"{param}: requests to webhooks are signed, and the engine that would call it has no "
            "TEMPER_REWARD_WEBHOOK_SECRET: have one set (in every engine that trains), or give a reward that the "
            "engine computes itself",
            param=param,
        )


def _covers(entry: str, url: str) -> bool:
    """Same scheme, host and port, and a path below that of the entry."""
    *place, prefix = webhook_parts(entry)
    *wanted, path = webhook_parts(url)
    return place == wanted and (path == prefix or path.startswith(prefix if prefix.endswith("/") else f"{prefix}/"))
