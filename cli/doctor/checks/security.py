"""The file of API keys, and certificates."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cli.doctor.findings import Finding, NotHere, failure, ok, warning
from cli.doctor.place import Place
from services.common.errors import InvalidRequest
from services.common.security.api_keys import Scope, parse_keys
from services.common.security.outbound import tls_context
from services.common.security.tls import TlsFiles, read_material

_SOON = timedelta(days=14)
_OTHERS = 0o077


def keys(place: Place) -> Finding:
    """The file of API keys can be read, has a valid key, and is nobody else's to read."""
    if not place.up.api_keys_file:
        return ok("there are no API keys: whoever reaches the gateway may do everything")
    file = Path(place.up.api_keys_file)
    try:
        found = parse_keys(file.read_bytes()).keys
    except OSError as error:
        return failure(
            f"{file} (TEMPER_API_KEYS_FILE) cannot be read: {error.strerror}",
            f"make it: temper keys create --name me --scopes inference,train,admin --file {file}",
        )
    except InvalidRequest as error:
        return failure(
            f"{file} is not a key file: {error.message}", "correct it, or make a new one with `temper keys create`"
        )
    valid = [key for key in found if key.refusal(datetime.now(UTC)) is None]
    if not valid:
        return failure(
            f"none of the {len(found)} keys in {file} is valid", f"temper keys create --name me --file {file}"
        )
    if file.stat().st_mode & _OTHERS:
        return warning(
            f"{file} can be read by others than its owner", f"chmod 600 {file}", mend=lambda: _close_to_others(file)
        )
    soon = [key for key in valid if key.expires_at is not None and key.expires_at - datetime.now(UTC) < _SOON]
    if len(soon) == len(valid):
        last = max(key.expires_at for key in soon if key.expires_at is not None)
        return warning(
            f"no key in {file} is valid after {last:%Y-%m-%d %H:%M} UTC", "make another with `temper keys create`"
        )
    if not any(Scope.ADMIN in key.scopes for key in valid):
        return warning(
            f"no valid key in {file} has the scope admin: nobody can attach or delete adapters by hand",
            f"temper keys create --name admin --scopes inference,train,admin --file {file}",
        )
    return ok(f"{len(valid)} of {len(found)} keys in {file} are valid")


def certificates(place: Place) -> Finding:
    """Certificates between gateway and engine belong together and are valid for a while."""
    files = TlsFiles.of(place.engine)
    if files is None:
        return ok("no certificates are named: `temper up` makes its own")
    try:
        material = read_material(files)
    except InvalidRequest as error:
        return failure(
            f"TEMPER_{str(error.param).upper()}: {error.message}", "make new certificates (docs/guides/security.md)"
        )
    if files.key.stat().st_mode & _OTHERS:
        return warning(
            f"{files.key} can be read by others than its owner",
            f"chmod 600 {files.key}",
            mend=lambda: _close_to_others(files.key),
        )
    left = material.not_after - datetime.now(UTC)
    if left < _SOON:
        return warning(
            f"{files.cert} ends on {material.not_after:%Y-%m-%d %H:%M} UTC, in {left.days} days",
            "renew it; running services read the new files by themselves",
        )
    return ok(f"the certificates are valid until {material.not_after:%Y-%m-%d}")


def authorities(place: Place) -> Finding:
    """The authorities of TEMPER_CA_BUNDLE can be read."""
    bundle = place.engine.ca_bundle
    if bundle is None:
        raise NotHere("TEMPER_CA_BUNDLE is not set: the public authorities are trusted")
    try:
        tls_context(place.engine)
    except (ssl.SSLError, OSError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return failure(
            f"{bundle} (TEMPER_CA_BUNDLE) is no file of certificates: {reason}", "name a PEM file of authorities"
        )
    return ok(f"the authorities of {bundle} are trusted beside the public ones")


def _close_to_others(file: Path) -> str:
    file.chmod(0o600)
    return f"chmod 600 {file}"
