"""Forge runs and evaluations on this machine, without a running Temper."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from services.adapter_tools.output import refuse_filled
from services.common.errors import InvalidRequest
from services.common.jobs.forge_recipe import Recipe, read_recipe
from services.common.jobs.scorers.grants import Grants
from services.common.security.signature import read_private_key, signer
from services.common.settings import CommonSettings
from services.common.storage.object_store import ObjectStore
from services.engine.models.checkpoint import checkpoint_digest
from services.engine.models.weights.shards import Progress
from services.engine.settings import EngineSettings
from services.forge.pipeline.evaluation import Evaluated, Suites, comparison, evaluated
from services.forge.pipeline.machine import Machine
from services.forge.pipeline.plan import plan_run
from services.forge.pipeline.run import Inputs, Pipeline
from services.forge.pipeline.save import save, saved_record, upload
from services.forge.pipeline.work import Work
from services.forge.record import read_record
from services.pod.device import Device
from services.pod.engine import use_threads
from services.pod.forging.engines import engine_bytes, engine_settings, opened
from services.pod.memory import device_bytes
from services.trainer.host.policy_host import PolicyHost


def machine(device: str, work: Path, threads: int = 0) -> Machine:
    """This machine, of which a run has everything; sets how it computes.

    Args:
        threads: CPU threads of one operator; 0: all cores.

    Raises:
        InvalidRequest: there is no such device.
    """
    # Once, and not with the first engine: sums of so many threads differ from those of fewer, and a run that goes on
    # may begin with a stage that needs no engine.
    use_threads(threads)
    hardware = Device.of(EngineSettings.model_validate({"device": device}))

    @contextmanager
    def open_engine(directory: Path) -> Iterator[PolicyHost]:
        with opened(engine_settings(directory, device), work / "no-adapters", Grants()) as host:
            yield host

    return Machine(device, device_bytes(hardware), open_engine, partial(engine_bytes, device=device))


def run(
    recipe_file: Path, work: Path | None, device: str, *, dry_run: bool, progress: Progress, threads: int = 0
) -> dict[str, Any]:
    """Runs a recipe to its end, or only plans it.

    Args:
        work: directory of what the stages make, which stays; None: one beside the output, which goes when the output is
            there.
        threads: CPU threads of one operator; 0: all cores.

    Raises:
        InvalidRequest, CheckpointRejected, …: as of Pipeline.run and plan_run.
    """
    recipe = read_recipe(recipe_file)
    place = recipe.bucket_and_prefix
    key = None if recipe.sign is None else read_private_key(recipe.sign)
    if place is None:
        out = Path(recipe.output)
    directory = work or _work_of(recipe, recipe_file)
    results = Work(directory)
    # One that was killed behind its last step has left its output, and a part of its work.
    ended = not dry_run and place is None and work is None and directory.is_dir()
    if place is None and not ended:
        refuse_filled(out)
    if dry_run:
        with tempfile.TemporaryDirectory() as scratch:
            inputs = _inputs(recipe, Work(Path(scratch)))
            planned = plan_run(Pipeline(inputs, results, machine(device, directory, threads), progress))
        planned.check(directory)
        return {"out": None, "output": recipe.output, "plan": planned.summary()}
    with results.locked():
        results.clean()
        inputs = _inputs(recipe, results)
        if ended:
            if (record := saved_record(inputs, out, key)) is not None:
                results.remove()
                return {"out": recipe.output, **report(record)}
            refuse_filled(out)
        progress = _numbered(inputs.stages, progress)
        found = machine(device, directory, threads)
        pipeline = Pipeline(inputs, results, found, progress)
        plan_run(pipeline).check(directory)
        forged = pipeline.run()
        if place is None:
            save(forged, out, key, found.telling(progress))
            record = read_record(out)
        else:
            saved = results.place(
                "saved", {"digest": forged.digest, "record": forged.made.content(), "key": signer(key)}
            )
            if not saved.path.exists():
                save(forged, saved.path, key, progress, name=place[1].rpartition("/")[2])
            store = ObjectStore(CommonSettings().model_copy(update={"s3_bucket": place[0]}))
            upload(saved.path, store, place[1], found.telling(progress), found.retry)
            record = read_record(saved.path)
        if work is None:
            results.remove()
    return {"out": recipe.output, **report(record)}


def evaluate_directory(
    model: Path,
    suites: Sequence[Path],
    baseline: Path | None,
    work: Path | None,
    device: str,
    *,
    seed: int,
    progress: Progress,
    threads: int = 0,
) -> dict[str, Any]:
    """Evaluates a checkpoint, and another to compare it with.

    Args:
        suites: files {suite}.jsonl, or directories of such.
        baseline: directory of the other; None: none.
        work: directory that keeps the answers, so that a run that was broken off goes on; None: they are not kept.

    Raises:
        InvalidRequest, CheckpointRejected, DoesNotFit: what is wrong with which file.
    """
    files = [file for given in suites for file in (sorted(given.glob("*.jsonl")) if given.is_dir() else [given])]
    if not files:
        raise InvalidRequest("there are no suites: name files {suite}.jsonl, or a directory of them", param="suites")
    with ExitStack() as stack:
        directory = work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        place = Work(directory)
        stack.enter_context(place.locked())
        place.clean()
        found = machine(device, directory, threads)
        chosen = Suites.of_files(files, place)

        def evaluation(name: str, checkpoint: Path) -> Evaluated:
            progress(f"{name}: digest of the model", 0, 0)
            return evaluated(name, checkpoint, checkpoint_digest(checkpoint), chosen, seed, place, found, progress)

        after = evaluation("evaluate", model)
        result: dict[str, Any] = {"model": str(model), "after": after.summary()}
        if baseline is not None:
            before = evaluation("baseline", baseline)
            result |= {
                "baseline": str(baseline),
                "before": before.summary(),
                "compared": comparison(before, after),
            }
        return result


def report(record: dict[str, Any]) -> dict[str, Any]:
    """What is told of a record at the end of a run."""
    return {
        "plan": record["plan"],
        "digest": record["outputs"]["digest"],
        "evaluation": record.get("evaluation"),
        "data": record["data"],
    }


def _numbered(stages: Sequence[str], progress: Progress) -> Progress:
    """Progress that tells the number of each stage, of all."""

    def tell(what: str, done: int, total: int) -> None:
        name = what.partition(":")[0]
        place = f"{stages.index(name) + 1}/{len(stages)} " if name in stages else ""
        progress(f"{place}{what}", done, total)

    return tell


def _work_of(recipe: Recipe, file: Path) -> Path:
    if recipe.bucket_and_prefix is None:
        out = Path(recipe.output)
        return out.with_name(f"{out.name}.work")
    return file.with_name(f"{file.stem}.work")


def _inputs(recipe: Recipe, work: Work) -> Inputs:
    return Inputs(
        model=recipe.model,
        settings=recipe.settings,
        suites=Suites.of_files(recipe.suites, work),
        data=recipe.data,
        data_name=recipe.data_name or (None if recipe.data is None else recipe.data.name),
        held_out=recipe.held_out,
    )
