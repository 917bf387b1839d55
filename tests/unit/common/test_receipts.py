"""Receipts: what is signed, what is refused, and a job in two parts."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from rich.text import Text

from cli.reports.receipt import receipt as told
from services.common.adapters.receipts import Receipt, digest, joined, parted
from services.common.errors import CheckpointRejected
from services.common.jobs import JOBS

KEY, OTHER = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
CONTENT: dict[str, Any] = {
    "format": 1,
    "version": "a@1",
    "digest": "d" * 64,
    "files": {"adapter_model.safetensors": "f" * 64},
    "base": {"name": "tiny", "digest": "b" * 64},
    "parents": [{"version": "a@0", "digest": "c" * 64}],
    "data": {"sha256": "e" * 64, "dataset": None},
    "job": {"id": "job-1", "attempt": 1, "spec": {"kind": "sft"}},
    "seeds": {"job": 1},
    "settings": {"learning_rate": 0.1},
    "code": {"temper": "1.0", "sources_sha256": "a" * 64},
    "libraries": {"torch": "2"},
    "kernels": "torch",
    "device": {"type": "cpu", "name": "AVX2"},
    "with": "é",
}


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


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"receipt": {**CONTENT, "digest": None}}, "digest: Input should be a valid string"),
        ({"receipt": {**CONTENT, "job": {"id": "job-1", "attempt": 1}}}, "job.spec: Field required"),
        ({"receipt": {**CONTENT, "device": "cpu"}}, "device"),
        ({"receipt": {**CONTENT, "settings": {"learning_rate": math.nan}}}, "JSON"),
        ({"receipt": {**CONTENT, "with": "\ud800"}}, "surrogates"),
        ({"signature": "mine"}, "no receipt"),
        ({"signature": [1]}, "no receipt"),
    ],
)
def test_half_a_receipt_is_refused(changed: dict[str, Any], says: str) -> None:
    document = {"receipt": CONTENT, "signature": None, **changed}
    with pytest.raises(CheckpointRejected, match=says):
        Receipt.of(document)


def test_a_receipt_says_nothing_in_our_words() -> None:
    said = {**CONTENT, "job": {**CONTENT["job"], "id": "job-1\n[green]verified[/]: by me"}, "kernels": "[/]"}
    text = Text.from_markup(told({"receipt": said, "signature": {}})).plain
    assert len(text.splitlines()) == 11
    assert "[green]verified[/]: by me, sft" in text


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
