"""The benchmark of the methods runs, in its smallest form, and its parts are what they say."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.lib.memory_store import MemoryStore
from benchmarks.lib.random_checkpoint import TINY
from benchmarks.training.methods import ADAPTER, EXAMPLE_METHODS, RandomText, Sizes, examples_job, measure, methods_pod
from benchmarks.training.next_request import first_token
from benchmarks.training.pod import TrainingPod, report_to, with_rest
from services.common.jobs import DpoJob, KtoJob, SftJob
from services.common.storage.object_store import ObjectNotFound, PreconditionFailed
from services.common.text.tokenizer import TextCodec
from services.engine.requests.adapter import AdapterChoice

SIZES = Sizes(examples=2, prompt_tokens=12, new_tokens=8, prompts=2, completions=4)


@pytest.fixture(scope="module")
def pod() -> Iterator[TrainingPod]:
    with methods_pod(TINY, "cpu", SIZES) as pod:
        torch.set_num_threads(1)
        yield pod


def test_a_step_and_its_parts(pod: TrainingPod) -> None:
    figures = measure(pod, "grpo", SIZES, 1, 1)
    assert list(figures["parts"]) == ["reference", "forward", "backward", "optimizer", "other"]
    assert sum(figures["parts"].values()) == pytest.approx(figures["step_seconds"], abs=1e-3)
    assert min(figures["parts"].values()) >= 0
    # Eight completions of at most 8 tokens behind 12; the last token is never an input.
    assert 8 * 12 <= figures["tokens_per_step"] <= 8 * 19
    assert figures["peak_gb"] > 0


def test_from_a_step_to_the_next_request(pod: TrainingPod) -> None:
    figures = measure(pod, "generate", SIZES, 2, 0)
    way = figures["end_to_end"]
    assert list(way) == [
        "swap", "rollout", "score", "forward", "backward", "optimizer", "other", "publish", "serve", "first_token"
    ]  # fmt: skip
    assert min(way.values()) >= 0
    assert way["rollout"] > 0 < way["first_token"]
    # Of two steps the median is the mean.
    assert sum(way.values()) == pytest.approx(figures["end_to_end_seconds"], abs=2e-3)
    assert figures["end_to_end_seconds"] > figures["step_seconds"]
    assert set(figures["own_job"]) == {"read", "prepare", "step", "publish", "serve", "first_token"}
    assert sum(figures["own_job"].values()) == pytest.approx(figures["own_job_seconds"], abs=2e-3)
    assert 0 < figures["groups_with_spread"] <= SIZES.prompts
    assert 1 <= figures["completion_length_mean"] <= SIZES.new_tokens
    # A version a step, and one of the job of its own.
    assert str(pod.registry.current(ADAPTER)) == f"{ADAPTER}@3"
    prompt = RandomText(pod.host.codec).prompt(4)
    assert first_token(pod.engine.loop, prompt, AdapterChoice(name=ADAPTER)) == f"{ADAPTER}@3"
    assert first_token(pod.engine.loop, prompt, AdapterChoice()) == ""


def test_examples_have_the_sizes() -> None:
    codec = TextCodec.from_directory(TINY)
    jobs = {method: examples_job(method, codec, SIZES, 3) for method in EXAMPLE_METHODS}
    sft, dpo, kto = jobs["sft"], jobs["dpo"], jobs["kto"]
    assert isinstance(sft, SftJob)
    assert isinstance(dpo, DpoJob)
    assert isinstance(kto, KtoJob)
    assert (len(sft.examples), sft.batch_size) == (len(kto.examples), kto.batch_size) == (6, 2)
    assert (len(dpo.examples), dpo.batch_size) == (3, 1)
    assert [example.label for example in kto.examples] == [True, False] * 3
    for example in sft.examples:
        assert isinstance(example.prompt, str)
        assert len(codec.encode_plain(example.prompt)) == 12
        assert len(codec.encode_plain(example.completion or "")) == 8
    with pytest.raises(ValueError, match="grpo does not learn from examples"):
        examples_job("grpo", codec, SIZES, 1)


def test_lines_are_appended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "lines.jsonl"
    report = report_to(argparse.Namespace(shape="tiny", device="cpu", out=out), more=1)
    report({"method": "sft"})
    report({"method": "dpo"})
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["method"], line["shape"], line["more"]) for line in lines] == [("sft", "tiny", 1), ("dpo", "tiny", 1)]
    assert capsys.readouterr().out == out.read_text()
    assert with_rest(3.0, {"a": 1.0, "b": 1.5}) == {"a": 1.0, "b": 1.5, "other": 0.5}


def test_the_store_in_memory_keeps_conditions() -> None:
    store = MemoryStore()
    first = store.put("a/b/c", b"1", if_absent=True)
    with pytest.raises(PreconditionFailed):
        store.put("a/b/c", b"2", if_absent=True)
    with pytest.raises(PreconditionFailed):
        store.put("a/x", b"2", if_match=first)
    second = store.put("a/b/c", b"2", if_match=first)
    with pytest.raises(PreconditionFailed):
        store.put("a/b/c", b"3", if_match=first)
    assert (store.head("a/b/c"), store.get("a/b/c").data) == (second, b"2")
    store.put("a/d", b"")
    assert (store.list("a/"), store.list("a/", recursive=False)) == (["a/b/c", "a/d"], ["a/d"])
    assert (store.list_dirs("a/"), store.list_dirs("")) == (["b"], ["a"])
    store.delete("a/b/c")
    store.delete("a/b/c")
    assert store.head("a/b/c") is None
    with pytest.raises(ObjectNotFound):
        store.get("a/b/c")
