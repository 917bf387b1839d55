"""Teacher: the second model of a pod, which opd jobs may learn from besides the base and its adapters."""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from services.common.errors import CheckpointRejected, InvalidRequest
from services.common.text.tokenizer import TextCodec
from services.engine.models.checkpoint import checkpoint_digest
from services.engine.models.config import ModelConfig
from services.engine.models.footprint import Storage
from services.engine.models.interface import CausalLM
from services.engine.models.registry import load_model, read_config
from services.engine.settings import EngineSettings

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class TeacherModel:
    """Teacher model, loaded beside the model that serves."""

    model: CausalLM
    digest: str


def second_config(settings: EngineSettings, codec: TextCodec) -> ModelConfig | None:
    """Config of the teacher checkpoint that the settings name; None: they name none.

    Args:
        codec: tokenizer of the model that serves.

    Raises:
        CheckpointRejected: the directory is incomplete, or its tokens are not those of the model that serves.
        InvalidRequest: the pod could not use it.
    """
    if settings.teacher_model is None:
        if settings.teacher_quantization in ("fp8", "int4"):
            raise InvalidRequest(
                "TEMPER_TEACHER_QUANTIZATION does nothing without TEMPER_TEACHER_MODEL", param="teacher_quantization"
            )
        return None
    if not settings.trainer:
        raise InvalidRequest(
            "TEMPER_TEACHER_MODEL is for training jobs, and TEMPER_TRAINER is off: leave one of them out",
            param="teacher_model",
        )
    config = read_config(settings.teacher_model)
    own = TextCodec.from_directory(settings.teacher_model)
    check_same_vocabulary(codec, own, f"TEMPER_TEACHER_MODEL={settings.teacher_model}")
    if own.vocab_size > config.vocab_size:
        raise CheckpointRejected(
            f"TEMPER_TEACHER_MODEL={settings.teacher_model}: the tokenizer has {own.vocab_size} tokens, the model "
            f"{config.vocab_size}"
        )
    return config


def check_same_vocabulary(student: TextCodec, teacher: TextCodec, what: str) -> None:
    """Checks that each token id means the same to both models. Templates may differ: the teacher reads token ids.

    Raises:
        CheckpointRejected: the vocabularies differ.
    """
    if student.digest == teacher.digest:
        return
    ours, theirs = (codec.tokenizer.get_vocab(with_added_tokens=True) for codec in (student, teacher))
    if ours == theirs:
        return
    different = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    raise CheckpointRejected(
        f"{what}: the teacher has another vocabulary: it has {len(theirs)} tokens and the model that serves "
        f"{len(ours)}, and {len(different)} of them differ (the first: {different[0]!r}). A distribution over other "
        "tokens cannot be learned from: name a checkpoint of the same family and generation"
    )


def load_teacher(settings: EngineSettings, student: CausalLM, storage: Storage) -> TeacherModel | None:
    """Loads the teacher checkpoint, in the dtype and on the device of the model that serves.

    Raises:
        CheckpointRejected: its files are incomplete or foreign.
    """
    if settings.teacher_model is None:
        return None
    model = load_model(
        settings.teacher_model,
        dtype=student.dtype,
        device=student.device,
        storage=storage,
        kernels=student.kernel_configs() if student.device.type == "cuda" else None,
    )
    digest = checkpoint_digest(settings.teacher_model)
    log.info("teacher loaded", bytes=model.nbytes(), digest=digest)
    return TeacherModel(model, digest)
