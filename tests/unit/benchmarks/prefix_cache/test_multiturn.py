"""The multi-turn benchmark sends what it says, and counts what it says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.lib.in_process import InProcessEngine, settings_for
from benchmarks.lib.multiturn_workloads import GENERATORS, Session, Sizes, Turn, Workload, fitting
from benchmarks.prefix_cache.multiturn import PEERS, Traffic, main, measure, report, table

TINY = Path(__file__).parents[4] / "models" / "tiny"
WHOLE = Sizes(248_320)


def made(sizes: Sizes) -> dict[str, Workload]:
    return {workload.name: workload for generate in GENERATORS.values() for workload in generate(sizes)}


@pytest.fixture(scope="module")
def whole() -> dict[str, Workload]:
    return made(WHOLE)


def test_a_seed_makes_the_same_workloads(whole: dict[str, Workload]) -> None:
    assert made(WHOLE) == whole
    other = made(Sizes(248_320, seed=1))
    for name, workload in whole.items():
        assert workload.sessions[0].turns[0].new != other[name].sessions[0].turns[0].new
    firsts = {workload.sessions[0].turns[0].new[:8] for workload in whole.values()}
    assert len(firsts) == len(whole), "workloads share a beginning"


@pytest.mark.parametrize(
    ("name", "sessions", "requests", "concurrency", "first", "later", "out"),
    [
        ("a", 128, 320, 16, (992, 1056), (56, 72), 64),
        ("b", 128, 256, 8, (8128, 8256), (256, 256), 256),
        ("c", 16, 128, 16, (6000, 6000), (3900, 3900), 214),
        ("d", 256, 256, 256, (2100, 2100), None, 64),
        ("e", 128, 128, 128, (512, 512), None, 256),
        ("w1024", 20, 40, 1, (1024, 1024), (64, 64), 16),
        ("w8192", 20, 40, 1, (8192, 8192), (256, 256), 16),
    ],
)
def test_sizes(
    whole: dict[str, Workload],
    name: str,
    sessions: int,
    requests: int,
    concurrency: int,
    first: tuple[int, int],
    later: tuple[int, int] | None,
    out: int,
) -> None:
    workload = whole[name]
    assert len(workload.sessions) == sessions
    assert len(workload.order) == requests == sum(len(session.turns) for session in workload.sessions)
    assert workload.concurrency == concurrency
    for session in workload.sessions:
        assert first[0] <= len(session.turns[0].new) <= first[1]
        assert {turn.out for turn in session.turns} == {out}
        for turn in session.turns[1:]:
            assert later is not None
            assert later[0] <= len(turn.new) <= later[1]
    for number, session in enumerate(workload.sessions):
        assert workload.order.count(number) == len(session.turns)


def test_what_could_be_reused(whole: dict[str, Workload]) -> None:
    for name in ("a", "b", "c", "w1024"):
        session = whole[name].sessions[0]
        assert session.reusable(0) == 0
        assert session.reusable(1) == len(session.turns[0].new) + session.turns[0].out - 1
    shared = whole["d"].sessions
    assert sum(session.reusable(0) for session in shared) == 248 * 2000
    assert shared[8].turns[0].new[:2000] == shared[0].turns[0].new[:2000]
    assert shared[8].turns[0].new[2000:] != shared[0].turns[0].new[2000:]
    groups = whole["e"].sessions
    assert sum(session.reusable(0) for session in groups) == 120 * 511
    assert groups[0].turns == groups[15].turns != groups[16].turns


def test_marks_are_where_messages_end() -> None:
    session = Session((Turn((1, 2, 3), 2), Turn((4,), 5)))
    assert session.marks(0) == ()
    assert session.marks(1) == (3, 5)
    assert session.length == 11


def test_what_does_not_fit_is_left_out(whole: dict[str, Workload]) -> None:
    workload = whole["b"]
    assert fitting(workload, workload.tokens) == workload
    half = fitting(workload, workload.tokens // 2)
    assert 62 <= len(half.sessions) <= 64
    assert set(half.order) == set(range(len(half.sessions)))
    assert len(half.order) == 2 * len(half.sessions)


@pytest.fixture(scope="module")
def engine() -> Iterator[InProcessEngine]:
    settings = settings_for(TINY, "cpu", max_num_seqs=8, token_budget=256, tiers="")
    engine = InProcessEngine(settings, prefix_cache=True)
    yield engine
    engine.stop()


def test_prompts_of_turns_extend_each_other(engine: InProcessEngine) -> None:
    sizes = Sizes(engine.vocab_size, sessions=0.05, tokens=1 / 64)
    workload = made(sizes)["a"]
    sent = Traffic(engine, workload, "extend", marks=True).run()
    assert sorted(each.session for each in sent) == sorted(workload.order)
    turns: dict[int, list[tuple[int, ...]]] = {}
    for each in sent:
        assert each.finished is not None
        assert len(each.finished.output_ids) == workload.sessions[each.session].turns[each.turn].out
        before = turns.setdefault(each.session, [()])
        assert each.prompt[: len(before[-1])] == before[-1]
        assert each.prompt[len(before[-1]) :] == workload.sessions[each.session].turns[each.turn].new
        before.append((*each.prompt, *each.finished.output_ids))
        assert each.at < each.first <= each.ended


def test_turns_that_go_together_wait_for_each_other(engine: InProcessEngine) -> None:
    workload = made(Sizes(engine.vocab_size, sessions=0.2, tokens=1 / 256))["c"]
    assert workload.together
    sent = Traffic(engine, workload, "together", marks=False).run()
    ends = [max(each.ended for each in sent if each.turn == turn) for turn in range(8)]
    begins = [min(each.at for each in sent if each.turn == turn) for turn in range(8)]
    assert all(end <= begin for end, begin in zip(ends, begins[1:], strict=False))
    assert all(one < other for one, other in pairwise(begins))


def test_figures(engine: InProcessEngine) -> None:
    workload = made(Sizes(engine.vocab_size, sessions=0.1, tokens=1 / 16))["w1024"]
    found = measure(engine, workload, marks=False)
    assert found["requests"] == 4
    assert found["ttft_ms"]["cold"]["of"] == found["ttft_ms"]["warm"]["of"] == 2
    assert found["new"] + found["ideal"] == found["prompt_tokens"]
    assert 0 < found["cached"] <= found["ideal"]
    assert found["from"] == {"device": found["cached"]}
    # A prompt's last token may run as a decode.
    computed = found["prompt_tokens"] - found["cached"]
    assert computed - found["requests"] <= found["prefilled"] <= computed
    again = measure(engine, workload, marks=False)
    assert again["cached"] == found["cached"], "the cache was not emptied"
    text = table([{"workload": "alone", "peer": PEERS["w1024"], **found}, {"workload": "b", "failed": "x", "peer": {}}])
    assert "73" in text
    assert "vLLM" in text


def test_requests_that_fail_are_no_figures(engine: InProcessEngine) -> None:
    long = Workload("x", "x", (Session((Turn((1,) * 200_000, 2),)),), (0,), 1)
    with pytest.raises(Exception, match="context"):
        Traffic(engine, long, "x", marks=False).run()
    with pytest.raises(ValueError):
        report(long, [])


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "multiturn.jsonl"
    arguments = f"--device cpu --model {TINY} --workload e,w --shrink 64 --cache off --marks --out {out}"
    # Processes of their own keep their log and Triton's cache as these say; this one runs other tests.
    monkeypatch.setattr("benchmarks.lib.in_process.only_warnings", lambda: None)
    monkeypatch.setattr("services.pod.preflight.use_kernel_cache", lambda settings: None)
    monkeypatch.setattr("sys.argv", ["multiturn", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["name"] for line in lines] == ["e", "w1024", "w8192"]
    assert {line["cached"] for line in lines} == {0}
    assert all(line["prefilled"] >= line["prompt_tokens"] - line["requests"] for line in lines)
    assert "GRPO" in capsys.readouterr().out
