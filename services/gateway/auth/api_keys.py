"""The keys that are valid now, from a file that may change at any time."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from datetime import UTC, datetime
from pathlib import Path

import structlog

from services.common.errors import InvalidRequest, TemperError, Unauthorized
from services.common.security.api_keys import ApiKey, digest, parse_keys
from services.gateway.auth.caller import Principal
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.rate_limits.limits import Limits

log = structlog.get_logger(__name__)


class KeyRing:
    """Keys by digest.

    A key is looked up by its SHA-256 in a dictionary. What a lookup's time could tell is about digests, and nobody can
    choose a key by a part of its digest; the digest found is compared in constant time all the same.

    Args:
        path: the file; read at once.
        defaults: limits of keys that have none of their own.
        metrics: how many keys there are, and failed reloads.

    Raises:
        InvalidRequest: the file cannot be read or is not valid.
    """

    def __init__(self, path: Path, defaults: Limits, metrics: GatewayMetrics) -> None:
        self._path = path
        self._defaults = defaults
        self._metrics = metrics
        self._keys: dict[str, tuple[ApiKey, Principal]] = {}
        self._content = b""
        self._failed: str | None = None
        self._use(_read(path))

    def authenticate(self, key: str) -> Principal:
        """Principal that an API key belongs to.

        Raises:
            Unauthorized: nobody's, or not any more.
        """
        wanted = digest(key)
        found = self._keys.get(wanted)
        if found is None or not hmac.compare_digest(found[0].sha256, wanted):
            self._metrics.auth_refusals.labels("invalid").inc()
            raise Unauthorized("this API key is not valid here")
        return self._checked(*found)

    def owner(self, key_id: str) -> Principal:
        """Principal whose API key has this id.

        Raises:
            Unauthorized: nobody's, or not any more.
        """
        for entry, principal in self._keys.values():
            if entry.id == key_id:
                return self._checked(entry, principal)
        raise Unauthorized(f"there is no API key {key_id} any more")

    @property
    def entries(self) -> tuple[tuple[ApiKey, Principal], ...]:
        """Every key of the file, also those that are not valid any more, with its principal."""
        return tuple(self._keys.values())

    def _checked(self, entry: ApiKey, principal: Principal) -> Principal:
        if (refusal := entry.refusal(datetime.now(UTC))) is not None:
            self._metrics.auth_refusals.labels("revoked" if entry.revoked_at is not None else "expired").inc()
            raise Unauthorized(f"the API key {entry.id} {refusal}: ask for a new one")
        return principal

    async def follow(self, interval: float) -> None:
        """Reads the file again and again; never returns. A Secret that Kubernetes mounts changes by a swapped symlink,
        and editors replace files: so what is compared is the content."""
        while True:
            await asyncio.sleep(interval)
            try:
                await self.reload()
            except Exception:  # whatever it is: revoked keys must be noticed later
                log.exception("the key file could not be looked at")

    async def reload(self) -> None:
        """Takes over what the file says now, if that can be used; else the keys stay as they are."""
        try:
            self._use(await asyncio.to_thread(_read, self._path))
        except TemperError as error:
            self._metrics.api_keys.set(self._valid())
            if error.message != self._failed:  # once for each new trouble
                self._metrics.api_key_reload_failures.inc()
                log.error("the API keys stay as they were: the key file cannot be used", reason=error.message)
            self._failed = error.message
            return
        if self._failed is not None:
            log.info("the key file can be used again")
            self._failed = None

    def _use(self, content: bytes) -> None:
        fingerprint = hashlib.sha256(content).digest()
        if fingerprint != self._content:
            try:
                file = parse_keys(content)
            except InvalidRequest as error:
                raise InvalidRequest(f"{self._path} is not a key file: {error.message}") from None
            self._keys = {key.sha256: (key, self._principal(key)) for key in file.keys}
            self._content = fingerprint
            log.info("API keys read", keys=len(self._keys), valid=self._valid())
            if not self._keys:
                log.warning("the key file has no keys: every request that needs one is refused")
        self._metrics.api_keys.set(self._valid())

    def _valid(self) -> int:
        now = datetime.now(UTC)
        return sum(entry.refusal(now) is None for entry, _ in self._keys.values())

    def _principal(self, key: ApiKey) -> Principal:
        own = {name: value for name, value in key.limits.model_dump().items() if value is not None}
        defaults = {name: getattr(self._defaults, name) for name in Limits.__slots__}
        return Principal(key.id, frozenset(key.scopes), Limits(**{**defaults, **own}), key.log_share)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror or type(error).__name__}") from None
