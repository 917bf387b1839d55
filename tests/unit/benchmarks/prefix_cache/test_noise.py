"""The benchmark of the prefix cache's noise asks for what it says, and finds what is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.lib.in_process import InProcessEngine, settings_for
from benchmarks.prefix_cache.noise import (
    KINDS,
    TIERS,
    Apart,
    Ask,
    Asking,
    Measurement,
    conversations,
    main,
    measure,
    table,
)
from services.engine.requests.outputs import SampledToken
from services.engine.requests.sampling_params import SamplingParams

TINY = Path(__file__).parents[4] / "models" / "tiny"


def test_conversations_are_of_every_kind() -> None:
    talks = conversations(8, 1000, 0, 1.0)
    assert talks == conversations(8, 1000, 0, 1.0)
    assert talks != conversations(8, 1000, 1, 1.0)
    assert [(talk.host, talk.cut < 1) for talk in talks] == 2 * [
        (False, False),
        (False, True),
        (True, False),
        (True, True),
    ]
    for talk in talks:
        assert 300 <= len(talk.turns[0]) <= 2500
        history = tuple(range(sum(map(len, talk.turns)) + 3 * talk.said))
        prompt = talk.prompt(history)
        before = len(prompt) - len(talk.last)
        assert prompt == history[:before] + talk.last
        assert before == len(history) if talk.cut == 1 else len(talk.turns[0]) + talk.said < before < len(history)


def test_distances() -> None:
    apart = Apart()
    one = [SampledToken(1, -1.0, top_ids=[1]), SampledToken(2, -2.0, top_ids=[5])]
    other = [SampledToken(1, -1.5, top_ids=[1]), SampledToken(2, -2.0, top_ids=[2])]
    apart.add(one, other)
    assert apart.figures() == {"mean": 0.25, "p99": 0.495, "max": 0.5, "equal": 0.5, "tokens": 2}
    assert (apart + apart).figures()["tokens"] == 4
    with pytest.raises(ValueError, match="compared with"):
        apart.add(one[:1], one[1:])


@pytest.fixture(scope="module")
def engine() -> Iterator[InProcessEngine]:
    settings = settings_for(
        TINY, "cpu", max_num_seqs=8, token_budget=256, mixed_prefill_tokens=16, state_snapshots=64, **TIERS
    )
    engine = InProcessEngine(settings, prefix_cache=True)
    yield engine
    engine.stop()


@pytest.mark.thorough
def test_the_cache_is_used_where_it_says(engine: InProcessEngine) -> None:
    measured = measure(engine, conversations(4, engine.vocab_size, 0, 48.0), answer=4)
    found = measured.figures()
    assert set(found["cached"]) == {"all", *KINDS}
    assert found["uncached"] == 0
    assert set(found["cached_tokens"]) == {"device", "host"}
    for figures in (found["cached"]["all"], *found["noise"].values(), found["other"]):
        assert figures["tokens"] == 16
    # Float32: whatever is right is within rounding, and another history is not.
    assert max(found["cached"]["all"]["max"], *(each["max"] for each in found["noise"].values())) < 1e-3
    assert found["other"]["mean"] > 1e-2


def test_what_is_wrong_is_told(engine: InProcessEngine) -> None:
    def given(*distances: float) -> Apart:
        return Apart(list(distances), 1)

    measured = Measurement(engine, answer=1)
    measured.lengths = [1]
    measured.cached = {kind: given(0.14, 0.14) for kind in KINDS}
    measured.noise = {"batch": given(0.1, 0.1), "decoded": given(0.05, 0.05)}
    measured.other = given(1.0)
    assert not measured.figures()["wrong"]
    assert measured.figures()["ratios"] == {"mean": 1.4, "p99": 1.4}
    measured.cached[KINDS[1]] = given(0.3, 0.3)
    assert measured.figures()["wrong"] == ["mean of the cache above the noise", "p99 of the cache above the noise"]
    measured.cached[KINDS[1]] = Apart()
    assert measured.figures()["wrong"] == [f"nothing of kind {KINDS[1]!r}"]
    measured.other = given(0.1)
    assert measured.figures()["wrong"][1:] == ["another history within the noise as well"]


def test_requests_that_fail_are_no_figures(engine: InProcessEngine) -> None:
    with pytest.raises(Exception, match="context"):
        Asking(engine).together([Ask((1,) * 200_000, SamplingParams(max_tokens=1))])


@pytest.mark.thorough
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "noise.jsonl"
    arguments = f"--device cpu --model {TINY} --conversations 4 --shrink 48 --out {out}"
    # Processes of their own keep their log and Triton's cache as these say; this one runs other tests.
    monkeypatch.setattr("benchmarks.lib.in_process.only_warnings", lambda: None)
    monkeypatch.setattr("services.pod.preflight.use_kernel_cache", lambda settings: None)
    monkeypatch.setattr("sys.argv", ["prefix_noise", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    line = json.loads(out.read_text())
    assert ended.value.code == bool(line["wrong"])
    assert line["kv"] == "auto"
    assert not [wrong for wrong in line["wrong"] if "above" not in wrong]
    assert table(line) in capsys.readouterr().out
