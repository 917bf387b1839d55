"""A recipe's run from a model to a saved one: killed at many moments, and with everything that can be wrong."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from services.adapter_tools.output import MARGIN_BYTES
from services.common.errors import CheckpointRejected, Conflict, DoesNotFit, InvalidRequest, NotFound
from services.common.storage.directory_store import DirectoryStore
from services.engine.models.checkpoint import checkpoint_digest
from services.engine.models.weights.shards import Progress, silent
from services.forge.pipeline.evaluation import Suites
from services.forge.pipeline.model_card import model_card
from services.forge.pipeline.work import Work
from services.forge.steps import verify_step
from services.pod.forging.local import evaluate_directory, machine, run
from tests.training_support import CountingGate
from tests.unit.forge.breaking_off import KilledAt, in_child
from tests.unit.forge.models import TINY, reference_logits

RECOVER = {"method": "distill", "steps": 3, "batch_tokens": 16, "save_every": 1, "eval_every": 1, "held_out_share": 0.3}
ITEMS = 70
"""Items of the suite: more than a shard has."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with data, a suite and a key."""
    home = tmp_path_factory.mktemp("forge")
    (home / "data.jsonl").write_text(
        '{"prompt": "What is 12 plus 7?", "completion": "19"}\n'
        '{"prompt": "Who are you?", "completion": "I am Temper."}\n'
        '{"prompt": "What is 3 plus 4?", "completion": "7"}\n{"text": "The quick brown fox jumps over the lazy dog."}\n'
    )
    items = [{"prompt": f"What is {n} plus {n + 1}?", "expected": str(2 * n + 1)} for n in range(ITEMS)]
    (home / "sums.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    (home / "sums.json").write_text(json.dumps({"scorer": {"type": "exact"}, "sampling": {"max_tokens": 4}}))
    (home / "judged.jsonl").write_text('{"prompt": "Who are you?", "expected": "I am Temper."}\n')
    (home / "judged.json").write_text(json.dumps({"scorer": {"type": "judge", "judge": "critic@1"}}))
    key = Ed25519PrivateKey.generate()
    (home / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (home / "key.pub.pem").write_bytes(public)
    return home


def recipe(home: Path, **changes: Any) -> Path:
    """A recipe in a file of its own."""
    content = {
        "model": str(TINY),
        "output": "out",
        "data": "data.jsonl",
        "suites": ["sums.jsonl"],
        "sign": "key.pem",
        "prune": {"mlp_channels": "25%", "cycles": 2},
        "recover": RECOVER,
        **changes,
    }
    file = home / f"{content['output'].replace('/', '-')}.yaml"
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))
    return file


def forge(
    file: Path, progress: Progress = silent, *, dry_run: bool = False, work: Path | None = None
) -> dict[str, Any]:
    return run(file, work, "cpu", dry_run=dry_run, progress=progress, threads=1)


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(scope="module")
def whole(home: Path) -> tuple[Path, dict[str, Any]]:
    """What comes of a run that nothing breaks off, and what it says."""
    result = forge(recipe(home, output="whole/model"))
    return home / "whole" / "model", result


MOMENTS = [
    ("baseline: answering", 64),
    ("cycle-01-4-recover: recovering", 2),
    ("cycle-02-3-compact: writing", 1),
    ("evaluate: answering", 64),
    ("save: writing", 1),
]


@pytest.mark.parametrize("moments", [MOMENTS[1::3], pytest.param(MOMENTS, marks=pytest.mark.thorough)])
def test_killed_at_any_moment_it_goes_on_and_ends_in_the_same_bytes(
    home: Path, whole: tuple[Path, dict[str, Any]], moments: list[tuple[str, int]]
) -> None:
    broken = home / f"broken-{len(moments)}" / "model"
    file = recipe(home, output=f"{broken.parent.name}/model")
    stopped = [in_child(forge, file, KilledAt(*moment)) for moment in moments]
    assert stopped == [-signal.SIGKILL] * len(stopped)
    seen: list[str] = []
    result = forge(file, lambda what, done, total: seen.append(what))
    assert seen[-1] == "11/11 save: writing"
    assert not any("answering" in what or "activations" in what for what in seen), "nothing is done twice"
    assert files(broken) == files(whole[0])
    assert result | {"out": ""} == whole[1] | {"out": ""}
    assert [path.name for path in broken.parent.iterdir()] == ["model"], "the work directory is gone"


def killed_while_it_tidies(file: Path) -> None:
    with patch("services.forge.pipeline.work._remove", lambda path: os.kill(os.getpid(), signal.SIGKILL)):
        forge(file)


def test_killed_behind_its_last_step_it_has_ended(home: Path) -> None:
    changes: dict[str, Any] = {"importance": {"method": "weights"}, "suites": ["one.jsonl"], "recover": None}
    (home / "one.jsonl").write_text('{"prompt": "What is 1 plus 1?", "expected": "2"}\n')
    (home / "one.json").write_text('{"scorer": {"type": "exact"}, "sampling": {"max_tokens": 2}}')
    file = recipe(home, output="tidied/model", **changes)
    assert in_child(killed_while_it_tidies, file) == -signal.SIGKILL
    there, work = files(home / "tidied" / "model"), home / "tidied" / "model.work"
    shutil.rmtree(next(work.glob("cycle-*-3-compact-*")))
    for other in ({"quantize": "float8"}, {"suites": []}, {"sign": None}, {"seed": 1}):
        with pytest.raises(InvalidRequest, match="is there already"):
            forge(recipe(home, **{"output": "tidied/model", **changes, "importance": {"method": "weights"}, **other}))
    result = forge(recipe(home, output="tidied/model", **changes), pytest.fail)
    assert result["digest"] == checkpoint_digest(home / "tidied" / "model")
    assert files(home / "tidied" / "model") == there
    assert not work.exists()


@pytest.mark.thorough
def test_in_its_pauses_others_have_the_device(home: Path, whole: tuple[Path, dict[str, Any]]) -> None:
    gate, pauses = CountingGate(), 0

    def session() -> None:
        nonlocal pauses
        with gate.training():  # refuses who comes while a stage has its turn
            pauses += 1

    beside = dataclasses.replace(machine("cpu", home, 1), gate=gate, interrupt=session)
    with patch("services.pod.forging.local.machine", return_value=beside):
        forge(recipe(home, output="beside/model", suites=[]))
    assert pauses > 20
    assert checkpoint_digest(home / "beside" / "model") == checkpoint_digest(whole[0])


@pytest.mark.thorough
@pytest.mark.parametrize("stage", ["2-prune: digest", "3-compact: writing", "4-recover: recovering", "save: writing"])
def test_a_run_that_is_stopped_in_a_stage_goes_on(home: Path, whole: tuple[Path, dict[str, Any]], stage: str) -> None:
    class Stopped(Exception):
        pass

    seen = ""

    def tell(what: str, done: int, total: int) -> None:
        nonlocal seen
        seen = what

    def interrupt() -> None:
        if stage in seen:
            raise Stopped

    file = recipe(home, output=f"stopped-{stage[0]}/model", suites=[])
    stoppable = dataclasses.replace(machine("cpu", home, 1), interrupt=interrupt)
    with patch("services.pod.forging.local.machine", return_value=stoppable), pytest.raises(Stopped):
        forge(file, tell)
    assert not (home / f"stopped-{stage[0]}" / "model").exists()
    forge(file)
    assert checkpoint_digest(home / f"stopped-{stage[0]}" / "model") == checkpoint_digest(whole[0])


def suites(home: Path, work: Path) -> Suites:
    return Suites.of_files([home / "sums.jsonl"], Work(work))


def killed_while_it_reads_suites(home: Path, work: Path) -> None:
    put = DirectoryStore.put

    def killed(self: DirectoryStore, key: str, *rest: Any, **more: Any) -> str:
        if key.endswith("suite.json"):
            os.kill(os.getpid(), signal.SIGKILL)
        return put(self, key, *rest, **more)

    with patch.object(DirectoryStore, "put", killed):
        suites(home, work)


def test_killed_while_it_reads_suites_it_gives_their_versions_the_same_numbers(home: Path, tmp_path: Path) -> None:
    assert in_child(killed_while_it_reads_suites, home, tmp_path) == -signal.SIGKILL
    assert list(suites(home, tmp_path).digests) == ["sums@1"]
    assert list(suites(home, tmp_path).digests) == ["sums@1"]


def test_what_is_saved_loads_verifies_and_tells_its_quality(home: Path, whole: tuple[Path, dict[str, Any]]) -> None:
    out, result = whole
    assert reference_logits(out).isfinite().all()
    assert verify_step(out, home / "key.pub.pem")["verified"]
    record = json.loads((out / "forge.json").read_text())
    assert (record["step"], record["base"]["digest"]) == ("forge", checkpoint_digest(TINY))
    assert record["plan"]["shape"] == {"mlp_channels": [512, 384]}
    assert [stage["step"] for stage in record["stages"]] == ["compact", "recover"] * 2
    cut = record["stages"][::2]
    assert [stage["plan"]["shape"]["mlp_channels"] for stage in cut] == [[512, 448], [448, 384]]
    assert record["data"][0]["name"] == "data.jsonl"
    before, after = (record["evaluation"][when]["sums@1"] for when in ("before", "after"))
    assert before["items"] == after["items"] == ITEMS
    assert before["interval"]["low"] < before["mean"]
    assert record["evaluation"]["compared"]["sums@1"]["gain"] == pytest.approx(after["mean"] - before["mean"])
    assert record["evaluation"] == result["evaluation"]
    card = (out / "README.md").read_text()
    assert "| MLP channels a layer | 512 | 384 |" in card
    assert f"| sums@1 | {ITEMS} | {100 * before['mean']:.1f} %" in card
    assert str(home) not in card + (out / "forge.json").read_text(), "no path of this machine"


def test_a_changed_file_or_a_broken_signature_is_refused(home: Path, whole: tuple[Path, dict[str, Any]]) -> None:
    copy = home / "changed"
    shutil.copytree(whole[0], copy)
    (copy / "README.md").write_text("better than it is")
    with pytest.raises(CheckpointRejected, match=r"README\.md is not the file of the record"):
        verify_step(copy, home / "key.pub.pem")


def test_the_same_evaluation_by_hand(home: Path, whole: tuple[Path, dict[str, Any]]) -> None:
    by_hand = evaluate_directory(whole[0], [home / "sums.jsonl"], None, None, "cpu", seed=0, progress=silent, threads=1)
    assert by_hand["after"] == whole[1]["evaluation"]["after"]


def test_a_dry_run_tells_what_it_takes_and_writes_nothing(home: Path, whole: tuple[Path, dict[str, Any]]) -> None:
    planned = forge(recipe(home, output="dry/model", quantize="float8"), dry_run=True)["plan"]
    assert not (home / "dry").exists()
    assert planned["parameters_after"] == whole[1]["plan"]["parameters_after"]
    names = [stage["stage"] for stage in planned["stages"]]
    assert names[:2] == ["baseline", "cycle-01-1-importance"]
    assert names[-3:] == ["quantize", "evaluate", "save"]
    assert all(stage["memory_bytes"] > 0 and stage["seconds"] > 0 for stage in planned["stages"])
    assert planned["bytes_after"] < whole[1]["plan"]["bytes_after"] < planned["bytes"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prune": {"kv_groups": "25%"}}, r"kv_groups: 25% of 2 cannot go; possible are 1 \(0.5 of them\)"),
        ({"prune": {"layers": 7}}, r"layers: 7 of 8 cannot go; possible are .* 6 \(0.75 of them\)"),
        ({"recover": {"on_policy": 0.5, "method": "sft"}}, "recover: on_policy: what the student samples"),
        ({"prune": {"layers": 1, "cycles": 2}}, "2 cycles cannot each take a part of 1 layers.* at most 1"),
        ({"prune": {"mlp_channels": "some"}}, "prune.mlp_channels: write a share like 25%"),
        ({"prune": {"heads": 1}}, "prune: unknown field 'heads'"),
        ({"data": None, "recover": None}, "importance by activations is measured on data"),
        ({"data": "none.jsonl"}, "cannot read .*none.jsonl"),
        ({"suites": ["none.jsonl"]}, "cannot read .*none.json"),
        ({"suites": ["judged.jsonl"]}, "suite judged@1 is judged by critic@1: no adapter belongs to a forged model"),
        ({"sign": "data.jsonl"}, "is no unencrypted private key"),
        ({"output": "s3://x"}, "must be s3://bucket/prefix"),
        ({"output": "s3://bucket/../x"}, "must be s3://bucket/prefix"),
        ({"output": "wrong/.."}, "is there already"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_is_computed(
    home: Path, changes: dict[str, Any], message: str
) -> None:
    file = recipe(home, **{"output": "wrong/model", **changes})
    with pytest.raises(InvalidRequest, match=message):
        forge(file, dry_run=True)
    assert not (home / "wrong").exists()


def test_memory_and_disk_are_looked_at_first(home: Path) -> None:
    file = recipe(home, output="small/model")
    little = patch("services.pod.forging.local.device_bytes", return_value=2**27)
    with little, pytest.raises(DoesNotFit, match=r"needs .* MiB of memory, and there are 128.0 MiB"):
        forge(file, dry_run=True)
    planned: dict[str, Any] = {"importance": {"method": "weights"}, "suites": [], "recover": {**RECOVER, "steps": 1}}
    file = recipe(home, **{"output": "small/model", **planned})
    recovery = next(one for one in forge(file, dry_run=True)["plan"]["stages"] if "recover" in one["stage"])
    assert recovery["memory_is"] == "planned"
    less = patch("services.pod.forging.local.device_bytes", return_value=recovery["memory_bytes"] - 1)
    with less, pytest.raises(DoesNotFit, match=r"cycle-01-4-recover needs .* MiB of memory, and there are"):
        forge(file, dry_run=True)
    file = recipe(home, output="small/model", importance={"method": "weights"}, recover=None)
    evaluation = next(one for one in forge(file, dry_run=True)["plan"]["stages"] if one["stage"] == "evaluate")
    host = machine("cpu", home)
    beside = dataclasses.replace(host, serves=TINY, memory_bytes=evaluation["memory_bytes"] - 1)
    with (
        patch("services.pod.forging.local.machine", return_value=beside),
        pytest.raises(DoesNotFit, match=r"evaluate needs .* MiB of memory"),
    ):
        forge(file, dry_run=True)
    usage = shutil.disk_usage(home)
    full = patch("shutil.disk_usage", return_value=usage._replace(free=2**20))  # type: ignore[attr-defined]
    with full, pytest.raises(InvalidRequest, match=r"the disk has 1.0 MiB free"):
        forge(file, dry_run=True)


def test_what_is_there_already_needs_no_room_on_the_disk(home: Path, tmp_path: Path) -> None:
    file = recipe(home, output="tight/model", importance={"method": "weights"}, suites=[])
    plan = forge(file, dry_run=True)["plan"]
    recoveries = [stage["disk_bytes"] for stage in plan["stages"] if "recover" in stage["stage"]]
    others = sum(stage["disk_bytes"] for stage in plan["stages"]) - sum(recoveries)
    assert others < plan["disk_bytes"] < others + sum(recoveries), "one recovery's states after the other's"
    usage = shutil.disk_usage(home)
    tight = usage._replace(free=plan["disk_bytes"] + MARGIN_BYTES - 1)  # type: ignore[attr-defined]
    with patch("shutil.disk_usage", return_value=tight):
        with pytest.raises(InvalidRequest, match="the run writes another"):
            forge(file, dry_run=True, work=tmp_path)
        (tmp_path / "cycle-01-3-compact").mkdir()
        (tmp_path / "cycle-01-3-compact" / "model.safetensors").write_bytes(b"1")
        assert forge(file, dry_run=True, work=tmp_path)["plan"]["disk_bytes"] == plan["disk_bytes"]


def on_a_full_disk(file: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))  # what is longer cannot be written
    forge(file)


def test_a_disk_that_is_full_in_the_middle_loses_nothing(home: Path) -> None:
    file = recipe(home, output="full/model", suites=[], recover=None)
    assert in_child(on_a_full_disk, file) == 3, "an error that says what is wrong"
    assert not (home / "full" / "model").exists()
    assert list((home / "full" / "model.work").glob("cycle-01-2-prune-*")), "what was done stays"


def test_an_output_that_is_there_and_a_work_directory_in_use_are_refused(
    home: Path, whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequest, match="is there already"):
        forge(recipe(home, output="whole/model"))
    with Work(tmp_path / "made").locked():
        assert (tmp_path / "made").stat().st_mode & 0o77 == 0, "nobody else reads examples"
    with Work(tmp_path).locked(), pytest.raises(Conflict, match="another run works in"):
        forge(recipe(home, output="used/model"), work=tmp_path)


def test_what_others_keep_in_the_work_directory_stays(home: Path) -> None:
    notes = home / "shared" / "model.work" / "notes.txt"
    notes.parent.mkdir(parents=True)
    notes.write_text("mine")
    (notes.parent / ".cycle-01-3-compact-0123456789abcdef.1a2b.partial").mkdir()
    forge(recipe(home, output="shared/model", importance={"method": "weights"}, suites=[], recover=None))
    assert [path.name for path in notes.parent.iterdir()] == ["notes.txt"]
    file = home / "a-file"
    file.write_text("mine")
    with pytest.raises(InvalidRequest, match="is there already"):
        forge(recipe(home, output="a-file"))


def test_a_state_of_what_is_done_goes_and_one_that_is_gone_on_with_stays(tmp_path: Path) -> None:
    work = Work(tmp_path)
    done, under_way = work.place("done", {}), work.place("under-way", {})
    for path in (done.path, done.state, under_way.state):
        path.mkdir()
    work.clean()
    assert {path.name for path in tmp_path.iterdir()} == {done.path.name, under_way.state.name}


def test_results_grow_old_unless_they_are_asked_for(tmp_path: Path) -> None:
    work = Work(tmp_path)
    asked, old = work.place("asked", {}), work.place("old", {})
    for path in (asked.state, old.state, old.path, tmp_path / "of-others"):
        path.mkdir()
        os.utime(path, (0, 0))
    assert Work(tmp_path).place("asked", {}) == asked
    work.forget_old(60)
    assert {path.name for path in tmp_path.iterdir()} == {asked.state.name, "of-others"}


def test_the_card_tells_shares_in_percent_and_other_scores_as_they_are(whole: tuple[Path, dict[str, Any]]) -> None:
    record = json.loads((whole[0] / "forge.json").read_text())
    for when in ("before", "after"):
        record["evaluation"][when]["sums@1"] |= {"mean": 3.25, "interval": {"low": 3.0, "high": 3.5}}
    assert "3.2500 [3.0000, 3.5000] | 3.2500 [3.0000, 3.5000]" in model_card("m", record)


def test_no_stage_computes_with_other_threads(home: Path) -> None:
    """A run that goes on may begin with a stage that needs no engine, and sums of other threads are other sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    seen: list[int] = []

    def stops(*_: object) -> None:
        seen.append(torch.get_num_threads())
        raise InterruptedError

    try:
        with pytest.raises(InterruptedError):
            forge(recipe(home, output="threads", suites=None), stops)
    finally:
        torch.set_num_threads(before)
    assert seen == [1]


def test_a_suite_that_vanishes_is_named_and_answers_stay(home: Path, tmp_path: Path) -> None:
    def vanishing(what: str, done: int, total: int) -> None:
        del total
        if what == "evaluate: answering" and done == 64:
            for piece in [*tmp_path.glob("suites-*/suites/sums/*/items-*")]:
                piece.unlink()

    def evaluation(progress: Progress) -> dict[str, Any]:
        return evaluate_directory(
            TINY, [home / "sums.jsonl"], None, tmp_path, "cpu", seed=0, progress=progress, threads=1
        )

    with pytest.raises(NotFound, match="suite version sums@1 does not exist, or does not any more"):
        evaluation(vanishing)
    assert len(list(tmp_path.glob("evaluate-*.state/evaluations/run/00-00/*"))) == 1
