"""Forge jobs in a pod: of the model that the engine serves, in the trainer's turns and its memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from services.common.errors import Conflict, InvalidRequest, NotFound, Unavailable
from services.common.evaluation.suites.names import parse_suite_ref
from services.common.evaluation.suites.store import SuiteStore
from services.common.jobs import ForgeJob, SftExample
from services.common.jobs.kinds.forge import STORED, ForgeSettings
from services.common.security.signature import signer
from services.common.storage.object_store import ObjectStore
from services.engine.models.interface import resolve_dtype
from services.engine.settings import EngineSettings
from services.forge.files import write_text
from services.forge.pipeline.evaluation import Suites
from services.forge.pipeline.machine import Machine
from services.forge.pipeline.needs import STREAM_BYTES
from services.forge.pipeline.plan import plan_run
from services.forge.pipeline.run import Inputs, Pipeline
from services.forge.pipeline.save import discard, save, upload, uploaded
from services.forge.pipeline.work import Work
from services.forge.record import described_digest
from services.forge.recovery.plan import LoadedTeacher
from services.pod.engine import Guest
from services.pod.forging.engines import TrainerTurns, engine_bytes, engine_settings, opened
from services.pod.host import PodHost
from services.trainer.evaluation.run import Retry
from services.trainer.host.policy_host import PolicyHost
from services.trainer.memory.budget import MemoryNeed
from services.trainer.runtime.attempts.forge import ForgeLink
from services.trainer.runtime.job_link import JobCancelled

_KEPT_SECONDS = 7 * 86400.0
"""Age at which results of jobs that failed or went elsewhere are removed."""


class PodForge:
    """Runs forge jobs of one pod, on its trainer's thread. Results of stages are kept on the disk by their inputs, so a
    job goes on where it was, and another one that begins alike does as well.

    Args:
        settings: of the engine that serves.
        work: directory of the results.
        key: records are signed with it; None: they are not.
    """

    def __init__(
        self,
        settings: EngineSettings,
        host: PodHost,
        store: ObjectStore,
        work: Path,
        key: Ed25519PrivateKey | None = None,
    ) -> None:
        self._key = key
        self._settings = settings
        self._host = host
        self._store = store
        self._work = work

    def __call__(self, job_id: str, job: ForgeJob, link: ForgeLink) -> Mapping[str, Any]:
        """Runs a job and returns where its checkpoint is, and its digest.

        Raises:
            InvalidRequest: a level is impossible, the disk full; DoesNotFit: the memory.
            NotFound: a suite does not exist, or does not any more.
            CheckpointRejected: the checkpoint's files are not those that the engine serves.
        """
        prefix = f"{STORED}{job_id}"
        digest = uploaded(self._store, prefix, link.retry)
        if digest is None:  # else an earlier attempt ended before it said so
            digest = self._forged(prefix, job, link)
        return {"model": f"s3://{self._settings.s3_bucket}/{prefix}", "digest": digest}

    def tidy(self) -> None:
        """Removes what no job has asked for in a week, users' examples among it: without another job nothing would.
        Nothing is done where another engine forges, or the directory cannot be written, which the next job tells."""
        if self._work.is_dir():
            work = Work(self._work)
            with suppress(Conflict, InvalidRequest), work.locked():
                work.clean()
                work.forget_old(_KEPT_SECONDS)

    def _forged(self, prefix: str, job: ForgeJob, link: ForgeLink) -> str:
        """Makes the checkpoint and returns its digest."""
        work = Work(self._work)
        with ExitStack() as stack:
            link.retry(lambda: _enter(work, stack))
            work.clean()
            work.forget_old(_KEPT_SECONDS)
            inputs = self._inputs(job, work, link.retry)
            stages, machine = _Stages(inputs.stages, link), self._machine(link)
            pipeline = Pipeline(inputs, work, machine, stages)
            plan_run(pipeline).check(self._work)
            forged = pipeline.run()
            machine.take("save", STREAM_BYTES, "free some")  # and gives back what the stage before had
            saved = work.place("saved", {"name": job.name, "record": forged.made.content(), "key": signer(self._key)})
            if not saved.done:
                save(forged, saved.path, self._key, machine.telling(stages), name=job.name)
            link.fence()
            try:
                upload(saved.path, self._store, prefix, machine.telling(stages), link.retry)
            except JobCancelled:  # nobody will ask for it; what fails otherwise may be gone on with
                with suppress(Unavailable):
                    discard(self._store, prefix)
                raise
            digest = described_digest(saved.path)
            stages.end()
            work.forget()
        return digest

    def _inputs(self, job: ForgeJob, work: Work, retry: Retry) -> Inputs:
        store, manifests = SuiteStore(self._store), []
        for place, ref in enumerate(job.suites):
            name, number = parse_suite_ref(ref)
            try:
                manifests.append(retry(lambda name=name, number=number: store.get(name, number)))  # type: ignore[misc]
            except NotFound as error:
                raise NotFound(f"suites[{place}]: {error.message}", param=f"suites[{place}]") from error
            manifests[-1].settings.scorer.check_allowed(f"suites[{place}].scorer", self._host.grants.granted)
        return Inputs(
            model=self._settings.model,
            settings=ForgeSettings.model_validate({name: getattr(job, name) for name in ForgeSettings.model_fields}),
            suites=Suites.of(store, manifests),
            data=_file_of(job.examples, "data", work),
            data_name="examples of the job" if job.examples else None,
            held_out=_file_of(job.eval_examples, "held-out", work),
            digest=self._host.base_digest,
        )

    def _teacher(self) -> LoadedTeacher | None:
        """The engine's model, where it computes what the files say: it is neither quantized nor of another dtype."""
        model = self._host.model
        plain = model.device.type == "cpu" or self._settings.quantization == "none"
        if not plain or model.dtype != resolve_dtype("auto", model.device):
            return None
        return LoadedTeacher(self._settings.model, self._host.base_digest, model)

    def _machine(self, link: ForgeLink) -> Machine:
        host, device = self._host, self._host.model.device.type

        @contextmanager
        def open_engine(directory: Path) -> Iterator[PolicyHost]:
            if machine.is_served(directory):
                yield host  # the engine that serves answers, behind its users' requests
                return
            guest = Guest(partial(TrainerTurns, host.gate), host.train_memory_bytes)
            settings = engine_settings(directory, device)
            with opened(settings, self._work / "no-adapters", host.grants, guest) as beside:
                yield beside

        machine = Machine(
            device=device,
            memory_bytes=host.train_memory_bytes,
            open_engine=open_engine,
            engine_bytes=partial(engine_bytes, device=device),
            serves=self._settings.model,
            teacher=self._teacher(),
            gate=host.gate,
            # All of it stays where it is in the pauses, in which sessions compute.
            reserve=lambda need: host.memory_budget.reserve_job(MemoryNeed(need, 0)),
            interrupt=link.interrupt,
            retry=link.retry,
        )
        return machine


def _enter(work: Work, stack: ExitStack) -> None:
    """Takes the work directory until the stack is closed. Raises Unavailable: another engine has it now."""
    try:
        stack.enter_context(work.locked())
    except Conflict as error:
        raise Unavailable(f"another engine forges in {work.directory}, which is waited for") from error


class _Stages:
    """Progress of a pipeline as that of a job: the finished stages, of all."""

    def __init__(self, stages: Sequence[str], link: ForgeLink) -> None:
        self._stages = stages
        self._link = link
        self._finished = 0
        self._first: int | None = None
        """Stage that an attempt begins with."""

    def __call__(self, what: str, done: int, total: int) -> None:
        name = what.partition(":")[0]
        if name in self._stages:
            self._finished = self._stages.index(name)
            self._first = self._finished if self._first is None else self._first
            if self._finished > self._first:
                self._link.kept()
        self._link.progress(self._finished, len(self._stages), what, done, total)

    def end(self) -> None:
        """Tells that all are finished."""
        self._link.progress(len(self._stages), len(self._stages), "saved", 1, 1)


def _file_of(examples: Sequence[SftExample], name: str, work: Work) -> Path | None:
    """Examples of a job as the file that stages read; None: there are none."""
    if not examples:
        return None
    lines = [example.model_dump_json(exclude_none=True) + "\n" for example in examples]
    place = work.place(name, {"lines": lines})
    if not place.done:
        write_text(place.path, "".join(lines))
    return place.path
