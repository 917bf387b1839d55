"""Records of forged checkpoints, their signatures, and that verification fails closed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from services.adapter_tools.extract import extract
from services.common.errors import CheckpointRejected, InvalidRequest
from services.common.security.signature import read_private_key, read_public_key
from services.common.security.sources import sources_digest
from services.engine.models.checkpoint import checkpoint_digest
from services.engine.models.registry import read_config
from services.forge.importance.settings import Settings
from services.forge.record import FORGE_SOURCES, RECORD, SIGNATURE
from services.forge.steps import compact_step, importance_step, prune_step, quantize_step, verify_step
from tests.unit.adapter_tools.adapters import adapter
from tests.unit.forge.models import TINY


def make_key(directory: Path, name: str) -> tuple[Path, Path]:
    """Files of a private and its public key."""
    key = Ed25519PrivateKey.generate()
    private, public = directory / f"{name}.pem", directory / f"{name}.pub.pem"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return private, public


class Forged:
    """A cut model, signed, and what it was made with."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.private, self.public = make_key(directory, "forge")
        self.data = directory / "data.jsonl"
        self.data.write_text('{"text": "What is 12 plus 7?"}\n')
        self.cut, self.model = directory / "cut.json", directory / "model"
        scores = directory / "scores.json"
        importance_step(TINY, scores, Settings(method="activations", kinds=("mlp_channels",)), data=self.data)
        prune_step(TINY, scores, self.cut, {"mlp_channels": "25%"})
        compact_step(TINY, self.cut, self.model, sign=self.private)


@pytest.fixture(scope="module")
def forged(tmp_path_factory: pytest.TempPathFactory) -> Forged:
    return Forged(tmp_path_factory.mktemp("forged"))


def test_the_record_says_what_was_made_of_what(forged: Forged) -> None:
    record = json.loads((forged.model / RECORD).read_text())
    assert record["step"] == "compact"
    assert record["recipe"]["levels"] == {"mlp_channels": "25%"}
    assert record["recipe"]["method"] == "activations"
    assert record["base"] == {"name": "tiny", "digest": checkpoint_digest(TINY)}
    (data,) = record["data"]
    assert (data["name"], len(data["sha256"])) == ("data.jsonl", 64)
    assert record["code"]["sources_sha256"] == sources_digest(FORGE_SOURCES)
    assert record["outputs"]["digest"] == checkpoint_digest(forged.model)
    assert set(record["outputs"]["files"]) == {path.name for path in forged.model.iterdir()} - {RECORD, SIGNATURE}
    assert record["plan"]["parameters_after"] < record["plan"]["parameters"]
    verified = verify_step(forged.model, forged.public)
    assert (verified["steps"], verified["digest"]) == (["compact"], record["outputs"]["digest"])


def test_the_same_step_writes_the_same_bytes(forged: Forged, tmp_path: Path) -> None:
    compact_step(TINY, forged.cut, tmp_path / "again", sign=forged.private)
    for path in forged.model.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_steps_add_up_and_the_earlier_signature_is_not_inherited(forged: Forged, tmp_path: Path) -> None:
    quantize_step(forged.model, tmp_path / "unsigned")
    assert not (tmp_path / "unsigned" / SIGNATURE).exists()
    with pytest.raises(CheckpointRejected, match=r"forge\.json\.sig.*nothing is verified"):
        verify_step(tmp_path / "unsigned", forged.public)
    quantize_step(forged.model, tmp_path / "signed", sign=forged.private)
    assert verify_step(tmp_path / "signed", forged.public)["steps"] == ["compact", "quantize"]
    files = adapter(read_config(forged.model))
    extract(forged.model, files, tmp_path / "merged", base_digest=None, source="bot")
    assert not (tmp_path / "merged" / RECORD).exists(), "it would not be true of merged weights"


def _append(name: str) -> Callable[[Path], None]:
    def work(model: Path) -> None:
        with (model / name).open("ab") as file:
            file.write(b" ")

    return work


def _flip(model: Path) -> None:
    with (model / "model-00001-of-00001.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")


def _rewrite_record(model: Path) -> None:
    """Digests that fit a changed file, without the key."""
    record = json.loads((model / RECORD).read_text())
    record["recipe"]["method"] = "random"
    (model / RECORD).write_text(json.dumps(record))


def _link(model: Path) -> None:
    shutil.move(model / "config.json", model.parent / "config.json")
    (model / "config.json").symlink_to(model.parent / "config.json")


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (_append("config.json"), r"config\.json is not the file of the record"),
        (_flip, r"model-00001.* is not the file of the record"),
        (_append(RECORD), "the signature is not that of this record"),
        (_rewrite_record, "the signature is not that of this record"),
        (lambda model: (model / "tokenizer.json").unlink(), r"missing: tokenizer\.json"),
        (lambda model: (model / "more.safetensors").write_bytes(b""), r"not in the record: more\.safetensors"),
        (lambda model: (model / "code").mkdir(), "not in the record: code"),
        (_link, "is not a plain file"),
        (lambda model: (model / SIGNATURE).write_text("{}"), "file is malformed"),
        (lambda model: (model / SIGNATURE).write_text("[" * 10**6), "file is malformed"),
        (lambda model: (model / SIGNATURE).unlink(), "nothing is verified"),
        (lambda model: (model / RECORD).unlink(), "nothing is verified"),
    ],
)
def test_whatever_was_changed_is_refused(
    forged: Forged, tmp_path: Path, harm: Callable[[Path], object], message: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(forged.model, model)
    verify_step(model, forged.public)
    harm(model)
    with pytest.raises(CheckpointRejected, match=message):
        verify_step(model, forged.public)


def test_only_the_given_key_counts(forged: Forged, tmp_path: Path) -> None:
    private, public = make_key(tmp_path, "other")
    with pytest.raises(CheckpointRejected, match="signed with another key"):
        verify_step(forged.model, public)
    compact_step(TINY, forged.cut, tmp_path / "model", sign=private)
    with pytest.raises(CheckpointRejected, match="signed with another key"):
        verify_step(tmp_path / "model", forged.public)
    signature = json.loads((tmp_path / "model" / SIGNATURE).read_text())
    ours = json.loads((forged.model / SIGNATURE).read_text())["public_key"]
    (tmp_path / "model" / SIGNATURE).write_text(json.dumps(signature | {"public_key": ours}))
    with pytest.raises(CheckpointRejected, match="is not that of this record"):
        verify_step(tmp_path / "model", forged.public)


def test_keys_of_other_kinds_are_refused_before_anything_is_done(forged: Forged, tmp_path: Path) -> None:
    other = tmp_path / "ec.pem"
    curve = generate_private_key(SECP256R1())
    other.write_bytes(curve.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(InvalidRequest, match="another kind than Ed25519"):
        read_private_key(other)
    with pytest.raises(InvalidRequest, match="no public key in PEM"):
        read_public_key(forged.private)
    with pytest.raises(InvalidRequest, match="no unencrypted private key"):
        compact_step(TINY, forged.cut, tmp_path / "out", sign=forged.public)
    with pytest.raises(InvalidRequest, match="cannot read"):
        compact_step(TINY, forged.cut, tmp_path / "out", sign=tmp_path / "none")
    assert not (tmp_path / "out").exists()


def test_a_record_of_other_weights_is_not_carried_on(forged: Forged, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(forged.model, model)
    _flip(model)
    with pytest.raises(InvalidRequest, match="describes a checkpoint of digest"):
        quantize_step(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
