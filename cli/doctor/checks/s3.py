"""The object store."""

from __future__ import annotations

import email.utils
import time
import uuid
from datetime import UTC, datetime

import urllib3

from cli.doctor.findings import Finding, NotHere, failure, ok, warning
from cli.doctor.place import Place
from services.common.errors import Refused, TemperError, Unavailable
from services.common.security.outbound import pool
from services.common.storage.object_store import ObjectStore, StoreRejected
from services.common.storage.s3_connection import s3_url

_SECONDS = 5.0
_SKEW, _REFUSED_SKEW = 30.0, 600.0
"""Seconds. S3 refuses requests that were signed more than 15 minutes away from its clock."""


def answers(place: Place) -> Finding:
    """The object store answers."""
    settings = place.s3_settings
    try:
        _date(place)
    except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
        return failure(
            f"S3 at {settings.s3_endpoint} (TEMPER_S3_ENDPOINT) does not answer: {_first_line(error)}",
            "start it, or correct TEMPER_S3_ENDPOINT (host:port) and TEMPER_S3_SECURE",
        )
    return ok(f"S3 answers at {settings.s3_endpoint}")


def clock(place: Place) -> Finding:
    """The clocks of this machine and of the object store agree."""
    before = time.time()
    try:
        date = _date(place)
    except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
        raise NotHere("S3 does not answer") from error
    if date is None:
        raise NotHere("S3 says no time")
    skew = date.timestamp() - before
    text = f"the clock of S3 is {abs(skew):,.0f} s {'ahead of' if skew > 0 else 'behind'} this one"
    way_out = "set both clocks by NTP"
    if abs(skew) > _REFUSED_SKEW:
        return failure(f"{text}: from 15 minutes on it refuses every request", way_out)
    return warning(text, way_out) if abs(skew) > _SKEW else ok("the clocks of S3 and of this machine agree")


def permissions(place: Place) -> Finding:
    """The credentials may write, read, list and delete in the bucket."""
    settings = place.s3_settings
    store = ObjectStore(settings)
    key = f"probe/{uuid.uuid4().hex}"
    body = b"temper doctor"
    step = "write"
    try:
        store.put(key, body)
        step = "read"
        if store.get(key).data != body:
            return failure(f"S3 gives other bytes of {key} than were written", "use another S3 server")
        step = "list"
        if key not in store.list("probe/"):
            return failure(f"S3 does not list {key}, which was just written", "use a server with consistent lists")
        step = "delete"
        store.delete(key)
    except Refused as error:
        if "NoSuchBucket" in error.message:
            return failure(
                f"S3 has no bucket {settings.s3_bucket}",
                "make it, or correct TEMPER_S3_BUCKET; an engine's start makes it where it may",
                mend=lambda: _make_bucket(place),
            )
        return failure(
            f"S3 refuses to {step} in bucket {settings.s3_bucket}: {error.message}",
            "correct the keys, or allow them s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket there",
        )
    except Unavailable as error:
        if "RequestTimeTooSkewed" in error.message:
            return failure("S3 refuses requests, for the clocks differ too much", "set both clocks by NTP")
        if step == "write":
            raise NotHere("S3 does not answer") from error
        return failure(f"S3 fails to {step}: {error.message}", "look at its log")
    return ok(f"bucket {settings.s3_bucket} can be written, read, listed and deleted from")


def conditions(place: Place) -> Finding:
    """The object store honours conditional writes: else concurrent jobs overwrite each other's adapters."""
    try:
        ObjectStore(place.s3_settings).check()
    except StoreRejected as error:
        return failure(
            error.message.partition(": ")[0], "use a server with conditional writes: MinIO, SeaweedFS, AWS S3"
        )
    except TemperError as error:
        raise NotHere("the bucket cannot be written") from error
    return ok("S3 honours conditional writes")


def _date(place: Place) -> datetime | None:
    """Time that the server says. Raises urllib3's errors."""
    settings = place.s3_settings
    url = s3_url(settings.s3_endpoint, settings.s3_secure)
    with pool(settings, url, timeout=urllib3.Timeout(_SECONDS), retries=False) as connections:
        answer = connections.request("GET", f"{url}/")
    said = answer.headers.get("date")
    return email.utils.parsedate_to_datetime(said).astimezone(UTC) if said else None


def _make_bucket(place: Place) -> str:
    ObjectStore(place.s3_settings).check()
    return f"made the bucket {place.s3_settings.s3_bucket}"


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]
