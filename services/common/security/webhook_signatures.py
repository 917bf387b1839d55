"""Signatures of requests to webhooks, as Standard Webhooks has them (https://www.standardwebhooks.com)."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Mapping, Sequence

_PREFIX = "whsec_"


def signing_key(secret: str) -> bytes:
    """Key that a secret stands for: what is behind "whsec_" in base64, or the secret itself.

    Raises:
        ValueError: what is behind the prefix is no base64.
    """
    if not secret.startswith(_PREFIX):
        return secret.encode()
    try:
        return base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    except binascii.Error as error:
        raise ValueError(f"what is behind {_PREFIX} must be base64") from error


def signed_headers(keys: Sequence[bytes], event: str, timestamp: int, body: bytes) -> Mapping[str, str]:
    """Headers of a request, with a signature by each key."""
    content = f"{event}.{timestamp}.".encode() + body
    signatures = (base64.b64encode(hmac.new(key, content, hashlib.sha256).digest()).decode() for key in keys)
    return {
        "webhook-id": event,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(f"v1,{one}" for one in signatures),
    }
