"""Recovery of one checkpoint, from directory to directory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.adapter_tools.output import refuse_filled
from services.common.errors import DoesNotFit, InvalidRequest
from services.common.security.signature import read_private_key
from services.engine.models.checkpoint import canonical_name
from services.engine.models.registry import load_model
from services.engine.models.weights.shards import SHARD_BYTES, Progress, TensorToWrite, silent
from services.forge.checkpoint_output import pieces, write_model
from services.forge.record import Made, described_digest
from services.forge.recovery.memory import available_bytes
from services.forge.recovery.plan import RecoveryPlan, Teacher
from services.forge.recovery.run import RecoveryRun
from services.forge.recovery.settings import RecoveryReport, RecoverySettings
from services.forge.recovery.student import Student
from services.trainer.memory.estimate import mib
from services.trainer.runtime.local_checkpoints import Checkpoint, LocalCheckpoints

_JOB = "recovery"
"""Name of the directory with a recovery's states."""
_PIECE = 2**22


def recover(
    student: Path,
    out: Path,
    settings: RecoverySettings,
    *,
    data: Path,
    data_name: str | None = None,
    held_out: Path | None = None,
    teacher: Teacher | None = None,
    state: Path,
    memory_bytes: int | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    sign: Path | None = None,
    reserve: Callable[[int], object] = int,
    give_way: Callable[[], None] = lambda: None,
    pause: Callable[[], object] = lambda: None,
    progress: Progress = silent,
    should_stop: Callable[[], bool] = lambda: False,
) -> RecoveryReport | None:
    """Trains a forged checkpoint and writes what comes of it, with its record. Its shapes stay: what was cut out does
    not grow again.

    A state on disk is resumed from, and ends in the same bytes on a CPU in float32. When the checkpoint is there, the
    state is removed.

    Args:
        student: directory of a forged checkpoint; its forge.json says what was cut.
        out: directory that becomes the recovered checkpoint, whole or not at all.
        data: JSONL of examples as SFT takes them.
        data_name: what it is called in records; None: the file's name.
        held_out: JSONL of examples that are evaluated; None: a share of the data.
        teacher: what `distill` learns from: a checkpoint with the same tokenizer.
        state: directory for states to resume from.
        memory_bytes: of the device that it may take; None: what is free.
        sign: private key that the record is signed with.
        reserve: called with the bytes of the device that it is going to take, before it takes any.
        give_way: called between layers, for others to compute.
        pause: called between forwards, for others to have the device a while.
        progress: called with "recovering", steps that were made, and all.
        should_stop: asked between steps.

    Returns:
        None if should_stop said so; the state is on disk.

    Raises:
        DoesNotFit: it needs more memory; the message has the numbers, and nothing was allocated.
        InvalidRequest, CheckpointRejected: what is wrong with which file or setting.
    """
    refuse_filled(out)
    key = None if sign is None else read_private_key(sign)
    with ExitStack() as stack:
        work = RecoveryPlan.of(
            student,
            settings,
            stack,
            data=data,
            data_name=data_name,
            held_out=held_out,
            teacher=teacher,
            progress=progress,
        )
        device = torch.device(settings.device)
        available = available_bytes(device) if memory_bytes is None else memory_bytes
        work.check(settings, out, state, available)
        reserve(work.memory.total)
        try:
            return _recovered(work, out, settings, state, max_shard_bytes, key, give_way, pause, progress, should_stop)
        except torch.OutOfMemoryError as error:
            raise DoesNotFit(
                f"{device} ran out of memory, although the plan of {mib(work.memory.total)} is within the "
                f"{mib(available)} for it: something else takes more than its share. Lower tokens_per_forward, or "
                "set recompute to full",
                param="tokens_per_forward",
            ) from error


def _recovered(
    work: RecoveryPlan,
    out: Path,
    settings: RecoverySettings,
    state: Path,
    max_shard_bytes: int,
    key: Any,
    give_way: Callable[[], None],
    pause: Callable[[], object],
    progress: Progress,
    should_stop: Callable[[], bool],
) -> RecoveryReport | None:
    progress("loading the models", 0, 0)
    model = load_model(work.base.directory, dtype=settings.dtype, device=settings.device)
    teacher = None
    if isinstance(work.teacher, Path):
        teacher = load_model(work.teacher, dtype=settings.dtype, device=settings.device)
    elif work.teacher is not None:
        teacher = work.teacher.model
    student = work.student(settings, model)
    run = RecoveryRun(
        student, teacher, work.examples, settings, ends=work.codec.eos_ids, give_way=give_way, pause=pause
    )
    states, identity = LocalCheckpoints(state), work.identity(settings)
    _, found = states.newest(_JOB, identity)
    if found is not None:
        run.load_state(found.state)
    saved = run.course.step if found is not None else -1

    def save() -> None:
        nonlocal saved
        if saved != run.course.step:
            try:
                states.save(_JOB, identity, Checkpoint(run.course.step, run.state()))
            except OSError as error:
                raise InvalidRequest(f"cannot write to {state}: {error.strerror}", param="state") from error
            saved = run.course.step

    run.begin()
    progress("recovering", run.course.step, settings.steps)
    while not run.done:
        if should_stop():
            save()
            return None
        run.step()
        if run.course.step % settings.save_every == 0:
            save()
        progress("recovering", run.course.step, settings.steps)
    save()
    report = _written(work, run, out, settings, max_shard_bytes, key, progress)
    states.discard(_JOB)
    return report


def _written(
    work: RecoveryPlan,
    run: RecoveryRun,
    out: Path,
    settings: RecoverySettings,
    max_shard_bytes: int,
    key: Any,
    progress: Progress,
) -> RecoveryReport:
    """Writes the weights of the lowest held-out loss."""
    stopped_early = run.stopped_early
    run.go_to_best()
    student, course = run.student, run.course
    if course.before is None:
        raise ValueError("the recovery has not begun")
    results: dict[str, Any] = {
        "steps": course.step,
        "best_step": course.best_step,
        "stopped_early": stopped_early,
        "tokens": course.tokens,
        "sampled_tokens": course.sampled_tokens,
        "trained_parameters": work.trained,
        "held_out_before": course.before,
        "held_out_after": run.held_out_loss(student.written()) if course.best_step else course.before,
    }
    changed = frozenset(student.names) if course.best_step else frozenset()
    tensors = [_tensor(student, name, changed) for name in work.base.tensors]
    nbytes = sum(tensor.size for tensor in tensors)
    parameters = sum(math.prod(tensor.shape) for tensor in tensors)
    sizes = {"parameters": parameters, "parameters_after": parameters, "bytes": nbytes, "bytes_after": nbytes}
    made = Made(
        "recover",
        work.base.directory,
        work.digest,
        work.recipe(settings),
        sizes | {"shape": {}},
        work.examples.files,
        more={"results": results},
    )
    write_model(
        out,
        work.base.directory,
        tensors,
        work.base.data,
        max_shard_bytes=max_shard_bytes,
        progress=progress,
        finish=lambda directory: made.write(directory, key),
    )
    return RecoveryReport(
        out=out,
        digest=described_digest(out),
        seconds=course.seconds,
        memory_bytes=work.memory.total,
        **results,
    )


def _tensor(student: Student, name: str, changed: frozenset[str]) -> TensorToWrite:
    """A tensor of the result, in the shape and dtype that it has in the student's files."""
    header, data = student.base.tensors[name]
    path = canonical_name(name)
    made: Callable[[], Iterator[bytes | memoryview]] = partial(pieces, data)
    if path in changed:
        made = partial(_stored, student, path)
    return TensorToWrite(name, header["dtype"], tuple(header["shape"]), len(data), made)


def _stored(student: Student, path: str) -> Iterator[bytes]:
    flat: Tensor = student.stored(path).contiguous().view(torch.uint8).flatten()
    for start in range(0, flat.numel(), _PIECE):
        yield flat[start : start + _PIECE].cpu().numpy().tobytes()
