"""Steps of the forge on directories, each as a function: what `temper forge` does one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from services.common.jobs.kinds.forge import NEED_DATA
from services.common.security.signature import read_private_key, read_public_key
from services.common.text.tokenizer import TextCodec
from services.engine.models.checkpoint import checkpoint_digest
from services.engine.models.weights.shards import SHARD_BYTES, Progress, silent
from services.forge.compaction import Base, compact, compacted, plan
from services.forge.cut import CutFile
from services.forge.files import file_digest, refuse_existing
from services.forge.importance.scores import Scores
from services.forge.importance.settings import Settings
from services.forge.levels import Level, choose
from services.forge.record import Made, described_digest, history, verify
from services.forge.units import Kind

if TYPE_CHECKING:
    from services.engine.models.interface import CausalLM


def importance_step(
    model: Path,
    out: Path,
    settings: Settings,
    *,
    data: Path | None,
    data_name: str | None = None,
    max_tokens: int | None = None,
    device: str = "cpu",
    progress: Progress = silent,
    loaded: CausalLM | None = None,
    loading: Callable[[], AbstractContextManager[None]] = nullcontext,
    give_way: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Writes scores of a checkpoint's units.

    Args:
        data: calibration data, for methods that need it.
        data_name: what it is called in records; None: the file's name.
        max_tokens: of the data that are read; None: all.
        loaded: the model, if somebody else has it loaded, in the dtype that a loaded one would have.
        loading: held while the model is read from disk.
        give_way: called between layers, for others to compute.

    Raises:
        InvalidRequest, CheckpointRejected: what is wrong with which of them.
    """
    # Imported here: the other steps need no model.
    from services.engine.models.registry import load_model
    from services.forge.importance.calibration import Calibration
    from services.forge.importance.measure import measure

    refuse_existing(out)
    with ExitStack() as stack:
        base = Base(model, stack)
        calibration = None
        if data is not None and settings.method in NEED_DATA:
            codec = TextCodec.from_directory(model)
            calibration = Calibration.read(data, codec, name=data_name, max_tokens=max_tokens)
        progress("digest of the model", 0, 0)
        digest = checkpoint_digest(model)

        def load() -> CausalLM:
            if loaded is not None:
                return loaded
            with loading():
                return load_model(model, dtype="auto", device=device)

        scores = measure(base, digest, settings, load, calibration, progress, give_way)
    scores.write(out)
    return {
        "out": str(out),
        "method": scores.method,
        "base_digest": digest,
        "data": scores.data,
        "kinds": [*(["layers"] if scores.layers else []), *scores.widths],
    }


def prune_step(
    model: Path,
    scores_file: Path,
    out: Path,
    levels: Mapping[Kind, str],
    *,
    dry_run: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Writes which units stay, chosen by scores.

    Args:
        levels: kind → "25%" or a number of units that go.
        dry_run: only say what would come of it.

    Raises:
        InvalidRequest, CheckpointRejected: an impossible level, scores of another checkpoint, a broken file.
    """
    if not dry_run:
        refuse_existing(out)
    parsed = {kind: Level.parse(text, kind) for kind, text in levels.items()}
    scores = Scores.read(scores_file)
    with ExitStack() as stack:
        base = Base(model, stack)
        progress("digest of the model", 0, 0)
        digest = checkpoint_digest(model)
        scores.check(base.config, digest, mtp=base.mtp)
        cut = choose(base.config, scores, parsed, mtp=base.mtp)
        chosen = {
            "levels": {kind: level.text for kind, level in parsed.items()},
            "method": scores.method,
            "settings": scores.settings,
            "data": scores.data,
            "scores_sha256": file_digest(scores_file),
        }
        if not dry_run:
            CutFile(cut, digest, chosen).write(out)
        summary = plan(base, compacted(base, cut), cut).summary()
    return {"out": None if dry_run else str(out), "plan": summary, "layers": list(cut.layers), **chosen}


def compact_step(
    model: Path,
    cut_file: Path,
    out: Path,
    *,
    max_shard_bytes: int = SHARD_BYTES,
    sign: Path | None = None,
    dry_run: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Writes the checkpoint without the units that go, and its record.

    Args:
        sign: private key that the record is signed with.

    Raises:
        InvalidRequest, CheckpointRejected: a cut of another checkpoint, a broken file, an output that is there, a disk
            that is too small.
    """
    given = CutFile.read(cut_file)
    key = None if sign is None else read_private_key(sign)
    with ExitStack() as stack:
        base = Base(model, stack)
        progress("digest of the model", 0, 0)
        digest = checkpoint_digest(model)
        given.require(digest)
        history(model, digest)  # which is checked before anything is written
        summary = plan(base, compacted(base, given.cut), given.cut).summary()
        if dry_run:
            return {"out": None, "plan": summary}
        data = given.chosen.get("data")
        recipe = {**given.chosen, "layers": given.cut.layers, "cut_sha256": file_digest(cut_file)}
        made = Made("compact", model, digest, recipe, summary, () if data is None else (data,))
        write = partial(compact, base, given.cut)
        return _written(out, write, made, key, max_shard_bytes, progress)


def quantize_step(
    model: Path,
    out: Path,
    *,
    max_shard_bytes: int = SHARD_BYTES,
    sign: Path | None = None,
    dry_run: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Writes the checkpoint with matrices in float8, and its record.

    Args:
        sign: private key that the record is signed with.

    Raises:
        InvalidRequest, CheckpointRejected: it is quantized already, a broken file, an output that is there, a disk that
            is too small.
    """
    # Imported here: planning a cut needs no torch.
    from services.forge.quantization import BLOCK, Quantized

    key = None if sign is None else read_private_key(sign)
    with ExitStack() as stack:
        quantized = Quantized(model, stack)
        summary = {"bytes": quantized.bytes, "bytes_after": quantized.bytes_after}
        if dry_run:
            return {"out": None, "plan": summary}
        progress("digest of the model", 0, 0)
        digest = checkpoint_digest(model)
        history(model, digest)  # which is checked before anything is written
        made = Made("quantize", model, digest, {"format": "float8_e4m3", "block": BLOCK}, summary)
        return _written(out, quantized.write, made, key, max_shard_bytes, progress)


def _written(
    out: Path,
    write: Callable[..., None],
    made: Made,
    key: Ed25519PrivateKey | None,
    max_shard_bytes: int,
    progress: Progress,
) -> dict[str, Any]:
    """Writes a checkpoint with its record, and says what came of it.

    Args:
        write: writes the checkpoint into a directory and calls ``finish`` with it before it gets its name.
    """
    write(
        out,
        max_shard_bytes=max_shard_bytes,
        progress=progress,
        finish=lambda directory: made.write(directory, key),
    )
    return {"out": str(out), "plan": made.plan, "digest": described_digest(out)}


def verify_step(directory: Path, key: Path, *, progress: Progress = silent) -> dict[str, Any]:
    """Checks a forged checkpoint against its record and the record against a public key.

    Raises:
        InvalidRequest: no public key.
        CheckpointRejected: the checkpoint is not what was signed, or that cannot be known.
    """
    record = verify(directory, read_public_key(key), progress)
    steps = [str(earlier.get("step")) for earlier in record["history"]]
    return {
        "verified": True,
        "digest": record["outputs"]["digest"],
        "steps": [*steps, str(record["step"])],
        "files": len(record["outputs"]["files"]),
        "base": record["base"],
    }
