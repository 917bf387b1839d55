"""Key that a local Temper signs receipts with, made at its first start."""

from __future__ import annotations

import os
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat


def public_part(file: Path) -> Path:
    """Place of the public key of a private one."""
    return file.with_suffix(".pub.pem")


def signing_key(file: Path) -> Path:
    """The file of the private key, which is made if it is missing, with its public part beside it. Raises OSError."""
    if file.exists():
        return file
    key = Ed25519PrivateKey.generate()
    file.parent.mkdir(parents=True, exist_ok=True)
    public_part(file).write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    fresh = file.with_suffix(".new")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
        out.write(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    fresh.replace(file)
    return file
