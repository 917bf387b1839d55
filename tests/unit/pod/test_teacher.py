"""The second model of a pod: counted before it is loaded, refused where it has no use or other tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.common.errors import CheckpointRejected, DoesNotFit, InvalidRequest
from services.common.text.tokenizer import TextCodec
from services.engine.settings import EngineSettings
from services.pod.device import Device, check_device
from services.pod.memory import footprint, plan, teacher_storage
from services.pod.teacher import check_same_vocabulary, load_teacher, second_config
from tests.tokenizer_support import qwen_like_tokenizer
from tests.training_support import TrainingHost, write_checkpoint
from tests.unit.pod.test_memory import BF16, GIB, H200, QWEN_4B, settings

CPU = Device("cpu")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", qwen_like_tokenizer())


def test_its_weights_are_part_of_the_plan(tmp_path: Path, checkpoint: Path) -> None:
    second = write_checkpoint(tmp_path / "second", qwen_like_tokenizer(), hidden_size=48, seed=2)
    host = TrainingHost(checkpoint)
    given = settings(model=checkpoint, teacher_model=second)
    config = second_config(given, host.codec)
    assert config is not None
    _, alone = plan(host.model.config, given, torch.float32, CPU, GIB)
    _, both = plan(host.model.config, given, torch.float32, CPU, GIB, config)
    teacher = load_teacher(given, host.model, teacher_storage(given, CPU))
    assert teacher is not None
    assert both.teacher == teacher.model.weights.nbytes()
    assert alone.teacher == 0
    assert both.total - both.training - both.kv == alone.total - alone.training - alone.kv + both.teacher
    assert "teacher" in both.table()


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(DoesNotFit, match=r"teacher +7\.83 GiB"):
        plan(QWEN_4B, settings(), BF16, H200, 16 * GIB, QWEN_4B)
    plan(QWEN_4B, settings(), BF16, H200, 139 * GIB, QWEN_4B)


def test_a_quantized_one_is_smaller() -> None:
    def taught(kind: str) -> float:
        given = settings(teacher_quantization=kind).for_device("cuda")
        return footprint(QWEN_4B, given, BF16, H200, QWEN_4B).teacher / 1e9

    assert taught("none") == pytest.approx(8.41, abs=0.01)
    # As the model's own (see test_memory), and the head's matrix decoded.
    assert taught("fp8") == pytest.approx(3.57 + 1.27 + 0.64 + 1.27, abs=0.03)


def test_another_vocabulary_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    files = dict(qwen_like_tokenizer())
    files["tokenizer.json"] = files["tokenizer.json"].replace(b"<|im_start|>", b"<|start_it|>")
    other = write_checkpoint(tmp_path / "other", files)
    codec = TextCodec.from_directory(checkpoint)
    with pytest.raises(CheckpointRejected, match=r"TEMPER_TEACHER_MODEL=.*teacher has another vocabulary.*2 of them"):
        second_config(settings(model=checkpoint, teacher_model=other), codec)


def test_another_template_is_not_another_vocabulary() -> None:
    files = qwen_like_tokenizer()
    codec = TextCodec(files)
    other = TextCodec({**files, "chat_template.jinja": b"{{ messages[0].content }}"})
    assert codec.digest != other.digest
    check_same_vocabulary(codec, other, "a test")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"teacher_quantization": "fp8"}, "does nothing without TEMPER_TEACHER_MODEL"),
        ({"teacher_model": Path("x"), "trainer": False}, "TEMPER_TRAINER is off"),
    ],
)
def test_settings_without_use_are_refused(checkpoint: Path, fields: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        second_config(settings(model=checkpoint, **fields), TextCodec.from_directory(checkpoint))


def test_a_directory_without_a_checkpoint_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(CheckpointRejected):
        second_config(settings(model=checkpoint, teacher_model=tmp_path), TextCodec.from_directory(checkpoint))


def test_none_is_none(checkpoint: Path) -> None:
    assert second_config(EngineSettings(model=checkpoint), TextCodec.from_directory(checkpoint)) is None


def test_a_cpu_quantizes_no_teacher() -> None:
    with pytest.raises(InvalidRequest, match="TEMPER_TEACHER_QUANTIZATION=int4 needs a GPU"):
        check_device(settings(teacher_quantization="int4"), CPU)
