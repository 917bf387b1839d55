"""Parts of a distillation job: what the teacher cannot read, the losses, the byte plan, the clock."""

from __future__ import annotations

import dataclasses
import time
from array import array
from pathlib import Path

import pytest
import torch

from services.trainer.host.rollouts import Completion
from services.trainer.losses import divergence_loss, sampled_reverse_kl
from services.trainer.memory.estimate import TeacherWork, Workload, estimate
from services.trainer.sampling.distillation_samples import TokenizedPrompt, distillation_round, known_part
from services.trainer.sampling.rounds.round import completion_tensors, completions_of
from services.trainer.sampling.teacher import Teacher
from services.trainer.timers import StepTimer
from tests.tokenizer_support import qwen_like_tokenizer
from tests.training_support import TrainingHost, write_checkpoint

SAID = Completion((3, 500, 4), array("f", [-1.0, -2.0, -3.0]), truncated=False)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> TrainingHost:
    return TrainingHost(write_checkpoint(tmp_path_factory.mktemp("model"), qwen_like_tokenizer()))


def test_a_completion_ends_where_the_teacher_knows_no_further() -> None:
    assert known_part(SAID, 501) is SAID
    cut = known_part(SAID, 500)
    assert (cut.token_ids, cut.logprobs.tolist(), cut.truncated) == ((3,), [-1.0], True)
    assert known_part(SAID, 3).token_ids == ()


def test_lessons_of_a_round(host: TrainingHost) -> None:
    teacher = Teacher(host.model, None)
    chosen = [
        TokenizedPrompt((1, 2), None),
        TokenizedPrompt((5,), (6, 7)),
        TokenizedPrompt((8,), (9,)),
        TokenizedPrompt((4,), None),
    ]
    unknown = Completion((416,), array("f", [-1.0]), truncated=False)
    found = distillation_round(teacher, chosen, [SAID, None, SAID, unknown])
    assert (found.places, found.cut) == (4, 3)
    assert [tuple(sample.document.token_ids) for sample in found.given] == [(1, 2, 3), (5, 6, 7), (8, 3)]
    assert [sample.document.source for sample in found.given] == [0, 1, 2]
    assert [sample.sampled for sample in found.given] == [True, False, True]
    assert [sample.truncated for sample in found.given] == [True, False, True]
    assert found.given[0].behaviour is not None
    assert found.given[0].behaviour.tolist() == [-1.0]
    assert found.given[1].behaviour is None
    with pytest.raises(ValueError, match="not sampled"):
        distillation_round(teacher, chosen[:1], [None])


def test_completions_survive_a_checkpoint() -> None:
    empty = Completion((), array("f"), truncated=True)
    given = [SAID, empty, dataclasses.replace(SAID, truncated=True)]
    assert completions_of("x.", completion_tensors("x.", given)) == given
    assert completions_of("x.", completion_tensors("x.", [])) == []
    cut = [dataclasses.replace(empty, truncated=False, cut=True)]
    assert completions_of("x.", completion_tensors("x.", cut)) == cut
    some = [*given, *cut, dataclasses.replace(SAID.by(1.0), cut=True), SAID.by(2.5)]
    assert completions_of("x.", completion_tensors("x.", some)) == some


def test_losses_do_not_depend_on_the_cut() -> None:
    values = torch.rand(7, generator=torch.Generator().manual_seed(0))
    whole = divergence_loss(values, 7)
    assert float(divergence_loss(values[:3], 7) + divergence_loss(values[3:], 7)) == pytest.approx(float(whole))
    logprobs, behaviour, teacher = -torch.rand(3, 7, generator=torch.Generator().manual_seed(1))
    parts = [sampled_reverse_kl(logprobs[s], behaviour[s], teacher[s], 7) for s in (slice(3), slice(3, None))]
    assert float(sum(parts)) == pytest.approx(float(sampled_reverse_kl(logprobs, behaviour, teacher, 7)))


def test_the_sampled_gradient_is_the_advantage() -> None:
    """On policy: more of what the teacher finds likelier than the student."""
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    teacher = torch.tensor([-0.5, -4.0], requires_grad=True)
    loss = sampled_reverse_kl(logprobs, logprobs, teacher, 2)
    loss.backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.tensor([-0.25, 1.0]))
    assert teacher.grad is None


@pytest.mark.parametrize("fused", [False, True])
def test_a_teacher_is_in_the_byte_plan(host: TrainingHost, fused: bool) -> None:
    config = host.model.config
    work = Workload(1000, 4, 64, 2 if fused else 4, "full", fused)
    alone = estimate(config, work)
    taught = estimate(config, dataclasses.replace(work, teacher=TeacherWork(config)))
    adapted = estimate(config, dataclasses.replace(work, teacher=TeacherWork(config, 1000)))
    assert alone.teacher == 0
    assert taught.total == alone.total + taught.teacher
    # Its tile of logits, and at least the final hidden states.
    assert taught.teacher > 64 * (config.vocab_size + config.hidden_size) * work.itemsize
    assert adapted.teacher - taught.teacher >= 4000
    with pytest.raises(ValueError, match="no -1 numbers"):
        TeacherWork(config, -1)


def test_parts_add_up() -> None:
    watch = StepTimer(torch.device("cpu"))
    for _ in range(2):
        with watch.part("a"):
            time.sleep(0.01)
    with watch.part("b"):
        pass
    seconds = watch.seconds()
    assert set(seconds) == {"a_seconds", "b_seconds"}
    assert seconds["a_seconds"] >= 0.02 > seconds["b_seconds"]


def test_the_teacher_gives_way_between_layers(tmp_path: Path) -> None:
    """The teacher's hidden states are those of its forward at the trained rows, and carry no graph."""
    from services.common.jobs.documents import completion_document
    from services.trainer.packing import Microbatch

    host = TrainingHost(write_checkpoint(tmp_path, qwen_like_tokenizer()))
    microbatch = Microbatch.of([completion_document([1, 2, 3], [4, 5], 0)], torch.device("cpu"))
    calls = 0

    def give_way() -> None:
        nonlocal calls
        calls += 1

    hidden = Teacher(host.model, None).hidden(microbatch, give_way)
    whole = host.model.forward_train(
        microbatch.token_ids, microbatch.lengths, None, recompute="none", give_way=lambda: None
    )
    torch.testing.assert_close(hidden, whole[2:4])
    assert not hidden.requires_grad
    assert calls >= host.model.config.num_layers
