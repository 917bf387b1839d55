"""Receipts: what is signed, what is refused, and a job in two parts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from services.common.adapters.receipts import Receipt, digest, joined, parted
from services.common.errors import CheckpointRejected
from services.common.jobs import JOBS

KEY, OTHER = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
CONTENT: dict[str, Any] = {"format": 1, "version": "a@1", "settings": {"learning_rate": 0.1}, "with": "é"}


def test_a_signed_receipt_is_checked_in_any_layout() -> None:
    made = Receipt.sign(CONTENT, KEY)
    document = json.loads(made.to_bytes())
    shuffled = json.dumps({"signature": document["signature"], "receipt": dict(reversed(document["receipt"].items()))})
    for data in (made.to_bytes(), shuffled.encode()):
        Receipt.read(data).check(KEY.public_key())


@pytest.mark.parametrize("changed", [{"version": "a@2"}, {"settings": {"learning_rate": 0.2}}, {"more": 1}])
def test_a_changed_receipt_is_refused(changed: dict[str, Any]) -> None:
    made = Receipt.sign(CONTENT, KEY)
    with pytest.raises(CheckpointRejected, match="not that of this record"):
        Receipt({**CONTENT, **changed}, made.signature).check(KEY.public_key())


def test_whose_signature_it_is_counts() -> None:
    with pytest.raises(CheckpointRejected, match="another key"):
        Receipt.sign(CONTENT, OTHER).check(KEY.public_key())
    with pytest.raises(CheckpointRejected, match="TEMPER_RECEIPT_KEY_FILE"):
        Receipt.sign(CONTENT, None).check(KEY.public_key())


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"receipt": {"format": 2}, "signature": null}', b'{"receipt": 3}']
)
def test_what_is_no_receipt_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointRejected, match=r"no receipt|format 2"):
        Receipt.read(data)


@pytest.mark.parametrize("kind", JOBS)
def test_a_job_comes_apart_and_together(kind: str) -> None:
    for example in JOBS[kind].request_examples.values():
        job = JOBS[kind].model_validate({**example, "webhook": "https://example.com/hook"})
        kept, data = parted(job.model_dump(mode="json"))
        assert "example.com" not in json.dumps([kept, data])
        assert "What is 12" not in json.dumps(kept)
        assert "What is 12" in json.dumps(data)
        again = JOBS[kind].model_validate(joined(kept, data))
        assert again == job.model_copy(update={"webhook": None})
        assert digest(parted(again.model_dump(mode="json"))[1]) == digest(data)
