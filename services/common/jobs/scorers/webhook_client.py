"""Scores from a service of the operator's: signed requests, to listed addresses only, bounded in time and size.

Redirects are not followed: they would lead past the list of URLs that the operator allows.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import tenacity

from services.common.errors import Unavailable
from services.common.jobs.scorers.allowed_webhooks import Webhooks
from services.common.jobs.scorers.sample import Sample

TIMESTAMP_HEADER = "X-Temper-Timestamp"
SIGNATURE_HEADER = "X-Temper-Signature"
BATCH = 256
"""Samples of one request at most."""
_RESPONSE_BYTES = 4096
_RESPONSE_BYTES_EACH = 64
"""A float takes 25 characters at most."""
_LARGEST = 1e9


def sign(secret: str, timestamp: str, body: bytes) -> str:
    """Value of SIGNATURE_HEADER: "sha256=" and the hexadecimal HMAC-SHA256 of "{timestamp}.{body}"."""
    return "sha256=" + hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()


class _Again(Exception):
    """The webhook may answer better when asked again; says why."""


class WebhookScorer:
    """See WebhookReward. Raises InvalidRequest if the URL is not allowed."""

    def __init__(self, webhooks: Webhooks, url: str, where: str) -> None:
        webhooks.check(url, where)
        self._webhooks = webhooks
        self._url = url

    def score(self, samples: Sequence[Sample], interrupt: Callable[[], None]) -> list[float]:
        """See Scorer.score."""
        scores: list[float] = []
        # trust_env: proxies and .netrc of the environment are nobody's choice for this.
        with httpx.Client(
            follow_redirects=False,
            trust_env=False,
            timeout=self._webhooks.timeout_seconds,
            verify=self._webhooks.tls or True,
        ) as client:
            for start in range(0, len(samples), BATCH):
                scores += self._ask(client, samples[start : start + BATCH], interrupt)
        return scores

    def _ask(self, client: httpx.Client, samples: Sequence[Sample], interrupt: Callable[[], None]) -> list[float]:
        body = json.dumps({"samples": [_as_json(sample) for sample in samples]}).encode()

        def attempt() -> list[float]:
            interrupt()
            return self._attempt(client, body, len(samples))

        def pause(seconds: float) -> None:
            until = time.monotonic() + seconds
            while (left := until - time.monotonic()) > 0:
                interrupt()
                time.sleep(min(left, 0.1))

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_Again),
            stop=tenacity.stop_after_attempt(self._webhooks.attempts),
            wait=tenacity.wait_random_exponential(multiplier=0.5, max=10.0),
            sleep=pause,
            reraise=True,
        )
        try:
            return retrying(attempt)
        except _Again as error:
            raise Unavailable(
                f"the webhook {self._url} failed {self._webhooks.attempts} times, the last time because {error}"
            ) from error

    def _attempt(self, client: httpx.Client, body: bytes, count: int) -> list[float]:
        timestamp = str(int(time.time()))
        headers = {
            "content-type": "application/json",
            "accept": "application/json",
            # A small answer that unpacks to a large one would get around the limit on its size.
            "accept-encoding": "identity",
            "user-agent": "temper",
            TIMESTAMP_HEADER: timestamp,
            SIGNATURE_HEADER: sign(self._webhooks.secret or "", timestamp, body),
        }
        until = time.monotonic() + self._webhooks.timeout_seconds
        try:
            with client.stream("POST", self._url, content=body, headers=headers) as response:
                if response.status_code >= 500 or response.status_code == 429:
                    raise _Again(f"it answered with status {response.status_code}")
                if response.status_code != 200:
                    raise self._broken(_status_text(response))
                answer = self._read(response, _RESPONSE_BYTES + _RESPONSE_BYTES_EACH * count, until)
        except httpx.HTTPError as error:
            raise _Again(f"{type(error).__name__}: {error}") from error
        return self._scores(answer, count)

    def _read(self, response: httpx.Response, limit: int, until: float) -> bytes:
        parts: list[bytes] = []
        size = 0
        for part in response.iter_raw():
            size += len(part)
            if size > limit:
                raise self._broken(f"its answer is over {limit} bytes")
            if time.monotonic() > until:
                raise _Again(f"its answer took over {self._webhooks.timeout_seconds:g} s")
            parts.append(part)
        return b"".join(parts)

    def _scores(self, answer: bytes, count: int) -> list[float]:
        try:
            parsed = json.loads(answer)
        except (ValueError, RecursionError) as error:
            raise self._broken("its answer is not JSON") from error
        found = parsed.get("rewards") if isinstance(parsed, dict) else None
        if not isinstance(found, list):
            raise self._broken('its answer is not {"rewards": [...]}')
        if len(found) != count:
            raise self._broken(f"it gave {len(found)} rewards for {count} samples")
        for index, value in enumerate(found):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not -_LARGEST <= value <= _LARGEST:  # nor NaN
                raise self._broken(f"rewards[{index}] is {str(value)[:40]}, not a number between ±{_LARGEST:g}")
        return [float(value) for value in found]

    def _broken(self, why: str) -> Unavailable:
        """Error of a webhook that is not asked again here. The job keeps its checkpoint and is tried again, until its
        attempts are used up."""
        return Unavailable(f"the webhook {self._url} broke its contract: {why}")


def _status_text(response: httpx.Response) -> str:
    text = f"it answered with status {response.status_code}"
    return f"{text}, and redirects are not followed" if response.is_redirect else text


def _as_json(sample: Sample) -> dict[str, Any]:
    return {
        "prompt": sample.prompt,
        "completion": sample.completion,
        "text": sample.text,
        "tokens": sample.tokens,
        "truncated": sample.truncated,
        "answer": sample.answer,
        "metadata": dict(sample.metadata),
    }
