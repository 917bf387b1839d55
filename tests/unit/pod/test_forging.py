"""Forge jobs beside an engine that serves, on the tiny model: their memory, and an engine that is a guest of its
device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from services.common.errors import DoesNotFit, Unavailable
from services.common.jobs import ForgeJob
from services.common.jobs.scorers.grants import Grants
from services.common.storage.directory_store import DirectoryStore
from services.engine.settings import EngineSettings
from services.forge.pipeline.work import Work
from services.pod.engine import Guest
from services.pod.forging.engines import TrainerTurns, engine_settings, opened
from services.pod.forging.job import PodForge
from services.trainer.host.rollouts import RolloutRequest, RolloutSampling
from services.trainer.memory.budget import MemoryNeed
from services.trainer.runtime.attempts.forge import ForgeLink
from services.trainer.runtime.job_link import JobCancelled
from tests.rollout_support import TINY, running_pod

T = TypeVar("T")
ASKED, TOKENS = 6, 24
JOB = ForgeJob.model_validate({"prune": {"mlp_channels": "25%"}, "importance": {"method": "weights"}})


def test_what_a_forge_job_has_loaded_stays_its_own_in_the_pauses(tmp_path: Path) -> None:
    with running_pod() as pod:
        served = EngineSettings.model_validate({"model": TINY})
        forge = PodForge(served, pod.host, DirectoryStore(tmp_path / "store"), tmp_path / "work")
        link = ForgeLink(lambda *_: None, lambda: None, lambda operation: operation(), lambda: None, lambda: None)
        half = pod.host.train_memory_bytes // 2
        forge._machine(link).take("evaluate", half, "free some")
        budget = pod.host.memory_budget
        budget.reserve_session("small", MemoryNeed(0, half))
        with pytest.raises(DoesNotFit, match="the running job holds"):
            budget.reserve_session("large", MemoryNeed(0, half + 1))


def test_a_job_that_died_after_its_upload_is_not_done_again(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    store.put("forged/job-1/forge.json", b'{"outputs": {"digest": "ab"}}')
    link = ForgeLink(lambda *_: None, lambda: None, lambda operation: operation(), lambda: None, lambda: None)
    with running_pod() as pod:
        served = EngineSettings.model_validate({"model": TINY, "s3_bucket": "temper"})
        done = PodForge(served, pod.host, store, tmp_path / "work")("job-1", JOB, link)
    assert done == {"model": "s3://temper/forged/job-1", "digest": "ab"}
    assert not (tmp_path / "work").exists()


def test_a_job_that_is_cancelled_while_it_uploads_leaves_nothing_in_the_store(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    store.put("forged/job-12/forge.json", b"of another job")
    there: list[int] = []

    def interrupt() -> None:
        there.append(len(store.list_objects("forged/job-1/")))
        if there[-1] > 2:
            raise JobCancelled

    link = ForgeLink(lambda *_: None, interrupt, lambda operation: operation(), lambda: None, lambda: None)
    served = EngineSettings.model_validate({"model": TINY, "s3_bucket": "temper"})
    with running_pod() as pod:
        forge = PodForge(served, pod.host, store, tmp_path / "work")
        with pytest.raises(JobCancelled):
            forge("job-1", JOB, link)
    assert there[-1] > 2
    assert [entry.key for entry in store.list_objects("forged/")] == ["forged/job-12/forge.json"]


def test_a_directory_that_another_engine_forges_in_is_waited_for(tmp_path: Path) -> None:
    waited: list[str] = []
    other = ExitStack()

    def retry(operation: Callable[[], T]) -> T:
        try:
            return operation()
        except Unavailable as error:
            waited.append(error.message)
            other.close()
            return operation()

    link = ForgeLink(lambda *_: None, lambda: None, retry, lambda: None, lambda: None)
    other.enter_context(Work(tmp_path / "work").locked())
    with running_pod() as pod:
        served = EngineSettings.model_validate({"model": TINY, "s3_bucket": "temper"})
        PodForge(served, pod.host, DirectoryStore(tmp_path / "store"), tmp_path / "work")("job-1", JOB, link)
    assert len(waited) == 1
    assert "another engine forges in" in waited[0]


def test_what_nobody_asks_for_any_more_goes_when_an_engine_starts(tmp_path: Path) -> None:
    work = Work(tmp_path / "work")
    old, young = (work.place("data", {"sha256": name}).path for name in ("old", "young"))
    with running_pod() as pod:
        forge = PodForge(
            EngineSettings.model_validate({"model": TINY}), pod.host, DirectoryStore(tmp_path), work.directory
        )
        forge.tidy()
        assert not work.directory.exists()
        with work.locked():
            for path in (old, young, work.directory / "notes.txt"):
                path.write_text("{}")
            for path in (old, work.directory / "notes.txt"):
                os.utime(path, (0, 0))
            forge.tidy()  # somebody works there
            assert old.exists()
        forge.tidy()
    assert {path.name for path in work.directory.iterdir()} == {".lock", "notes.txt", young.name}


def test_the_trainer_computes_for_sessions_while_a_guest_answers(tmp_path: Path) -> None:
    """Training sessions compute in the pauses of a job, and a guest's steps are no pauses of the thread that waits for
    them: both come to the same gate."""
    computed = 0
    with running_pod() as pod:
        gate = pod.host.gate

        def session() -> None:
            nonlocal computed
            with gate.training():
                torch.zeros(64, 64) @ torch.zeros(64, 64)
                gate.give_way()
            computed += 1

        guest = Guest(partial(TrainerTurns, gate), pod.host.train_memory_bytes)
        with opened(engine_settings(TINY, "cpu"), tmp_path, Grants(), guest) as host:
            requests = [RolloutRequest((3, 17, 250 + number), number) for number in range(ASKED)]
            sampling = RolloutSampling(temperature=1.0, max_tokens=TOKENS)
            done = []
            while computed < 3 and len(done) < 20 * ASKED:
                done += host.rollouts.generate(requests, sampling, None, interrupt=session)
        assert computed >= 3
        assert all(completion.token_ids for completion in done)
        user = pod.user()
        assert len(user.answer(user.submit((3, 17, 250), max_tokens=8))) == 8


def test_a_guests_steps_are_ordered_where_they_are_queued() -> None:
    """A gate of a GPU marks the queue that is the thread's when a turn begins and ends."""
    told: list[str] = []

    class Gate:
        tpot_goal_seconds, training_waited = 0.01, 0.0

        @contextmanager
        def training(self) -> Iterator[None]:
            told.append("turn")
            yield
            told.append("end of turn")

        def give_way(self) -> None:
            told.append("way")

    @contextmanager
    def queue() -> Iterator[None]:
        told.append("queue")
        yield
        told.append("end of queue")

    turns = TrainerTurns(Gate(), queue)
    turns.acquire()
    with turns.launching():
        told.append("step")
    turns.release(0.1)
    turns.engine_idle()
    assert told == ["queue", "turn", "step", "end of turn", "end of queue"]
