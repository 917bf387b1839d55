"""Ed25519 signatures of records, which say what was made of what. Without torch."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from services.common.errors import CheckpointRejected, InvalidRequest

_ALGORITHM = "ed25519"
_MAKE = "openssl genpkey -algorithm ed25519 -out FILE"
_MAKE_PUBLIC = "openssl pkey -in FILE -pubout"


def read_private_key(path: Path) -> Ed25519PrivateKey:
    """Private key from a PEM file.

    Raises:
        InvalidRequest: it cannot be read, or is something else.
    """
    try:
        key = load_pem_private_key(_read(path), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InvalidRequest(
            f"{path} is no unencrypted private key in PEM: make one with {_MAKE}", param="sign"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise InvalidRequest(f"{path} is a key of another kind than Ed25519: make one with {_MAKE}", param="sign")
    return key


def read_public_key(path: Path) -> Ed25519PublicKey:
    """Public key from a PEM file.

    Raises:
        InvalidRequest: it cannot be read, or is something else.
    """
    try:
        key = load_pem_public_key(_read(path))
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InvalidRequest(f"{path} is no public key in PEM: make it with {_MAKE_PUBLIC}", param="key") from error
    if not isinstance(key, Ed25519PublicKey):
        raise InvalidRequest(f"{path} is a key of another kind than Ed25519: make it with {_MAKE_PUBLIC}", param="key")
    return key


def signer(key: Ed25519PrivateKey | None) -> str:
    """Public key of a private one as signatures name it; empty without one."""
    return "" if key is None else _text(_raw(key.public_key()))


def signed(message: bytes, key: Ed25519PrivateKey) -> bytes:
    """Contents of the file beside a message."""
    content = {
        "algorithm": _ALGORITHM,
        "public_key": signer(key),
        "signature": _text(key.sign(message)),
    }
    return (json.dumps(content, indent=2) + "\n").encode()


def check_signature(message: bytes, beside: bytes, key: Ed25519PublicKey) -> None:
    """Returns if the message is signed with the key; the one that the file names counts for nothing.

    Raises:
        CheckpointRejected: it is not, and why.
    """
    try:
        content = json.loads(beside)
        algorithm, named = content["algorithm"], content["public_key"]
        signature = base64.b64decode(content["signature"], validate=True)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointRejected(f"the signature's file is malformed: {error!r}") from error
    if algorithm != _ALGORITHM:
        raise CheckpointRejected(f"the signature's algorithm is {algorithm!r}, not {_ALGORITHM}")
    if named != _text(_raw(key)):
        raise CheckpointRejected(f"it is signed with another key: {named}, not {_text(_raw(key))}")
    try:
        key.verify(signature, message)
    except InvalidSignature as error:
        raise CheckpointRejected("the signature is not that of this record") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from error


def _raw(key: Ed25519PublicKey) -> bytes:
    return key.public_bytes(Encoding.Raw, PublicFormat.Raw)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
