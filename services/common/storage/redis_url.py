"""Parsed TEMPER_REDIS_URL: one server, or the primary of several that Sentinels watch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

_SCHEMES = {"redis+sentinel": False, "rediss+sentinel": True}


@dataclass(frozen=True, slots=True)
class SentinelUrl:
    """`redis+sentinel://[user][:password]@host:port,host:port/name[/database]`."""

    sentinels: tuple[tuple[str, int], ...]
    service: str
    """Name of the primary at the Sentinels."""
    database: int
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    """Password of the servers, and of the Sentinels as well."""
    tls: bool = False

    @property
    def login(self) -> dict[str, Any]:
        """Options for connections to servers and to Sentinels, in the words of redis-py."""
        return {"username": self.username, "password": self.password, "ssl": self.tls}


def sentinel_url(url: str) -> SentinelUrl | None:
    """None: the URL is of a server itself.

    Raises:
        ValueError: it is none of either kind; without the password.
    """
    parts = urlsplit(url)
    if parts.scheme not in _SCHEMES:
        return None
    login, _, hosts = parts.netloc.rpartition("@")
    username, _, password = login.partition(":")
    service, _, database = parts.path.strip("/").partition("/")
    if not service or (not database.isdecimal() and database):
        raise ValueError(f"{parts.scheme}:// needs the primary's name and a database: host:26379,host:26379/name/0")
    return SentinelUrl(
        tuple(_address(entry) for entry in hosts.split(",")),
        unquote(service),
        int(database or 0),
        unquote(username) or None,
        unquote(password) or None,
        _SCHEMES[parts.scheme],
    )


def _address(entry: str) -> tuple[str, int]:
    parts = urlsplit(f"//{entry.strip()}")
    if not parts.hostname:
        raise ValueError("a Sentinel is named host:port, separated by commas")
    return parts.hostname, parts.port or 26379
