"""URLs that an engine may send samples to: one rule for the gateway, which refuses jobs, and the trainer, which sends.

Where a job may send its samples is the operator's to say (TEMPER_REWARD_WEBHOOKS), so a job cannot make an engine talk
to its own network.
"""

from __future__ import annotations

import ipaddress
import re
import ssl
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.common.errors import InvalidRequest

_MIN_SECRET = 16


@dataclass(frozen=True, slots=True)
class Webhooks:
    """URLs that the operator allows, and how they are asked.

    Raises:
        ValueError: an entry of the list is no URL prefix, or the secret is too short.
    """

    allowed: tuple[str, ...] = ()
    """URL prefixes, each with its scheme."""
    secret: str | None = field(default=None, repr=False)
    timeout_seconds: float = 30.0
    """Duration of one attempt, from first to last byte."""
    attempts: int = 4
    tls: ssl.SSLContext | None = None
    """TLS context with the trusted authorities; None: the public ones."""
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    """API keys of other servers by URL prefix, for targets of evaluations."""

    def __post_init__(self) -> None:
        for entry in (*self.allowed, *self.keys):
            webhook_parts(entry)
        if self.secret is not None and len(self.secret) < _MIN_SECRET:
            raise ValueError(f"TEMPER_REWARD_WEBHOOK_SECRET must have at least {_MIN_SECRET} characters")

    def key_of(self, url: str) -> str | None:
        """The API key for requests to a URL, of the longest prefix that covers it; None: there is none."""
        covering = [entry for entry in self.keys if covers(entry, url)]
        return self.keys[max(covering, key=len)] if covering else None

    def check(self, url: str, where: str) -> None:
        """Raises InvalidRequest if a job may not send its samples there."""
        check_webhook(url, where, self.allowed, signed=self.secret is not None)


def check_webhook(url: str, where: str, allowed: Sequence[str], *, signed: bool) -> None:
    """Checks a webhook against what an engine allows.

    Args:
        where: place of the reward in the job.
        allowed: URL prefixes, each with its scheme.
        signed: the engine has a secret to sign requests with.

    Raises:
        InvalidRequest: the engine may not send there.
    """
    check_covered(url, where, allowed)
    param = f"{where}.url"
    if not signed:
        raise InvalidRequest(
            f"{param}: requests to webhooks are signed, and the engine that would call it has no "
            "TEMPER_REWARD_WEBHOOK_SECRET: have one set (in every engine that trains), or give a reward that the "
            "engine computes itself",
            param=param,
        )


def check_covered(url: str, where: str, allowed: Sequence[str]) -> None:
    """Checks a URL against the prefixes that an engine allows.

    Args:
        where: place in the job of what has the URL.

    Raises:
        InvalidRequest: the engine may not send there.
    """
    param = f"{where}.url"
    if not any(covers(entry, url) for entry in allowed):
        raise InvalidRequest(
            f"{param}: {url!r} is not covered by TEMPER_REWARD_WEBHOOKS of the engine that would call it, which lists "
            f"{', '.join(allowed) or 'nothing'}: have a prefix of the URL listed there (in every engine that trains), "
            "or do without it",
            param=param,
        )


def covers(entry: str, url: str) -> bool:
    """Whether a prefix covers a URL: same scheme, host and port, and a path below that of the entry."""
    *place, prefix = webhook_parts(entry)
    *wanted, path = webhook_parts(url)
    return place == wanted and (path == prefix or path.startswith(prefix if prefix.endswith("/") else f"{prefix}/"))


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
    if not _is_host(parts.hostname):
        raise ValueError("the host of a URL has 1 to 63 characters between dots, and ends in a number as IPv4 only")
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


def _is_host(host: str) -> bool:
    """Whether a host is a name that can be asked for, or an address as everybody writes it: 0x7f.1 is 127.0.0.1 to
    some and a name to others."""
    if ":" in host:
        return True
    labels = host.removesuffix(".").split(".")
    if any(not 0 < len(label) <= 63 for label in labels):
        return False
    if re.fullmatch(r"[0-9]+|0x[0-9a-f]*", labels[-1]) is None:
        return True
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True
