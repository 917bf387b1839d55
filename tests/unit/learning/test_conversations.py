"""Rated sessions, and completions that were rated together, as rows of data sets: trajectories."""

from __future__ import annotations

from typing import Any

from services.common.jobs import JOBS
from services.learning.datasets.convert import examples_of
from services.learning.request_log.index import answer_mark
from services.learning.request_log.record import LoggedChoice, LoggedRequest
from tests.unit.learning.logged import build, request, said


def walk(number: int, *, session: str | None, anew: bool = False, turns: int = 2, **more: Any) -> list[LoggedRequest]:
    """Requests of one session; each prompt goes on from the tokens before it, unless the template writes them anew."""
    asked: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    tokens, found = [1, 2], []
    for turn in range(turns):
        found.append(
            request(
                10 * number + turn,
                f"step {number}{turn}",
                messages=list(asked),
                prompt_token_ids=[list(tokens)],
                session=session,
                user=f"u-{session}",
                sampling={"temperature": 0.5},
                **more,
            )
        )
        asked += [{"role": "assistant", "content": "step"}, {"role": "tool", "content": f"seen {turn}"}]
        tokens = [1, 2, 9, 9] if anew else [*tokens, *(found[-1].choices[0].token_ids or ()), 7, 8]
    return found


def test_a_rated_session_is_a_trajectory() -> None:
    requests = [*walk(1, session="a"), *walk(2, session="b"), *walk(3, session="c", anew=True), request(50, "alone")]
    opinions = [
        said(1, session_id="a", score=1.0, user="ann"),
        said(2, completion_id="chatcmpl-10", score=0.5, user="ann"),
        said(3, completion_id="chatcmpl-21", thumb="down"),
        said(4, session_id="c", thumb="down"),
        said(5, completion_id="chatcmpl-50", thumb="up"),
    ]
    built = build({"trajectories": True}, requests, *opinions)
    rows = {row.session: row for row in built.rows["train"]}
    assert set(built.opinions) == {one.id for one in opinions}
    assert (rows[None].trajectory, rows[None].text) == (None, "alone"), "an answer without session is a row as ever"
    sampled = {"temperature": 0.5, "adapter": "toy@1", "logprobs": [-0.5, -0.25]}
    assert rows["a"].trajectory == {
        "segments": [
            {"type": "observation", "token_ids": [1, 2]},
            {"type": "action", "token_ids": [10, 0], **sampled, "reward": 0.5},
            {"type": "observation", "token_ids": [7, 8]},
            {"type": "action", "token_ids": [11, 0], **sampled},
        ],
        "truncated": False,
        "reward": 1.0,
    }
    assert (rows["a"].rating, rows["a"].opinions, rows["b"].rating) == (1.0, 2, -1.0)
    assert rows["c"].trajectory is not None
    assert rows["c"].trajectory["segments"][2] == {"type": "observation", "token_ids": [1, 2, 9, 9], "restarts": True}

    (group,) = examples_of("grpo", rows.values())
    JOBS["grpo"].model_validate({"kind": "grpo", "adapter": "bot", "groups": [group]})
    assert [one.get("reward") for one in group["trajectories"]] == [1.0, None, -1.0]
    examples = examples_of("sft", rows.values())
    JOBS["sft"].model_validate({"kind": "sft", "adapter": "bot", "examples": examples})
    assert [one.get("trajectory") for one in examples] == [rows["a"].trajectory, None]
    assert not examples_of("dpo", [rows["a"], rows["c"]])
    assert not examples_of("kto", [rows["a"]])
    for name in ("chatcmpl-10", "chatcmpl-11"):
        assert answer_mark(name) in rows["a"].marks, "each of its answers can be erased"


def test_completions_that_were_rated_together_are_a_trajectory() -> None:
    requests = [*walk(1, session=None, turns=3), *walk(2, session="b"), request(50, "one", "two", user="u-None")]
    names = ["chatcmpl-10", "chatcmpl-11", "chatcmpl-12"]
    opinions = [
        said(1, completion_ids=names, score=1.0, user="ann"),
        said(2, completion_ids=names, score=0.5, user="bob"),
        said(3, completion_id="chatcmpl-11", thumb="down"),
        # Of a session only the second turn.
        said(4, completion_ids=["chatcmpl-20", "chatcmpl-21"], thumb="up"),
        said(5, session_id="b", thumb="down"),
        # Not one conversation, one that is unknown, an id of two choices, nothing known at all.
        said(6, completion_ids=["chatcmpl-12", "chatcmpl-20"], label="odd", thumb="up"),
        said(7, completion_ids=["chatcmpl-20", "chatcmpl-unknown"], thumb="up"),
        said(8, completion_ids=["chatcmpl-20", "chatcmpl-50"], thumb="up"),
        said(9, completion_ids=["gone-1", "gone-2"], thumb="up"),
    ]
    built = build({"trajectories": True}, requests, *opinions)
    rows = built.rows["train"]
    assert (built.report.no_trajectory, built.report.without_request) == (3, 1)
    (whole,) = [row for row in rows if row.turn_ids == tuple(names)]
    assert whole.trajectory is not None
    actions = [one for one in whole.trajectory["segments"] if one["type"] == "action"]
    assert [one["token_ids"] for one in actions] == [[10, 0], [11, 0], [12, 0]]
    assert [one.get("reward") for one in actions] == [None, -1.0, None]
    assert (whole.trajectory["reward"], whole.rating, whole.opinions) == (0.75, 0.75, 3)
    assert {"fb_1", "fb_2", "fb_3"} <= set(built.opinions)
    others = [row for row in rows if row is not whole]
    assert [(row.session, row.rating) for row in others] == [("b", 0.0)], "the same tokens twice are one row"

    apart = build({}, requests, *opinions[:3]).rows["train"]
    assert [row.answer_id for row in apart] == names, "without trajectories each answer is a row, rated with the rest"


def test_sessions_that_are_no_trajectory_are_counted() -> None:
    changed = walk(1, session="a")
    changed[1] = changed[1].model_copy(update={"messages": [{"role": "user", "content": "another"}]})
    silent = walk(2, session="b", choices=(LoggedChoice(completion_id="x", message={}, finish_reason="stop"),))
    several = [request(30, "one", "two", session="c")]
    opinions = [said(number, session_id=name, thumb="up") for number, name in enumerate("abc")]
    built = build({"trajectories": True}, [*changed, *silent, *several], *opinions)
    assert (len(built.rows["train"]), built.report.no_trajectory) == (0, 3)
    spec = {"trajectories": True, "filter": {"min_rating": 0.5}}
    assert not build(spec, walk(1, session="a"), said(1, session_id="a", score=0.25)).rows["train"]
