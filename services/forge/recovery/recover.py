"""Recovery of one checkpoint, from directory to directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from services.engine.models.weights.shards import SHARD_BYTES, Progress, silent
from services.forge.recovery.settings import RecoveryReport, RecoverySettings

if TYPE_CHECKING:
    from services.engine.models.interface import CausalLM


def recover(
    student: Path,
    out: Path,
    settings: RecoverySettings,
    *,
    data: Path,
    data_name: str | None = None,
    held_out: Path | None = None,
    teacher: Path | CausalLM | None = None,
    state: Path,
    memory_bytes: int | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    sign: Path | None = None,
    give_way: Callable[[], None] = lambda: None,
    progress: Progress = silent,
    should_stop: Callable[[], bool] = lambda: False,
) -> RecoveryReport | None:
    """Trains a forged checkpoint and writes what comes of it, with its record. Its shapes stay: what was cut out does
    not grow again.

    A state on disk is resumed from, and ends in the same bytes on a CPU in float32. After the end it is removed.

    Args:
        student: directory of a forged checkpoint; its forge.json says what was cut.
        out: directory that becomes the recovered checkpoint, whole or not at all.
        data: JSONL of examples as SFT takes them.
        data_name: what it is called in records; None: the file's name.
        held_out: JSONL of examples that are evaluated; None: a share of the data.
        teacher: what `distill` learns from: directory of a checkpoint with the same tokenizer, or a loaded model on
            the settings' device.
        state: directory for states to resume from.
        memory_bytes: of the device that it may take; None: what is free.
        sign: private key that the record is signed with.
        give_way: called between layers, for others to compute.
        progress: called with "recovering", steps that were made, and all.
        should_stop: asked between steps.

    Returns:
        None if should_stop said so; the state is on disk.

    Raises:
        DoesNotFit: it needs more memory; the message has the numbers, and nothing was allocated.
        InvalidRequest, CheckpointRejected: what is wrong with which file or setting.
    """
    raise NotImplementedError
