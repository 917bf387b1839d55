"""Converts rows of a data set into examples of training jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

from services.learning.datasets.rows import Json, Row, digest

ExampleKind = Literal["sft", "dpo", "kto", "grpo"]


def examples_of(kind: ExampleKind, rows: Iterable[Row]) -> list[Json]:
    """Examples of a job's kind, as its `examples` take them (of grpo: its `groups`). Rows that say nothing to the kind
    are left out.

    sft learns corrections, and the best answer of each prompt unless it was rated badly. dpo prefers corrections to
    what they correct, preferred answers to the others, and of each prompt the best rated answer to the worst. kto takes
    each rated answer for good or bad. grpo compares the rated answers of each prompt, by the tokens that were sampled.
    Trajectories are for sft, the best of each beginning, and for grpo.
    """
    by_prompt: dict[str, list[Row]] = {}
    for row in rows:
        by_prompt.setdefault(row.beginning, []).append(row)
    return [example for those in by_prompt.values() for example in CONVERTERS[kind](those)]


def _sft(rows: Sequence[Row]) -> list[Json]:
    played = [row for row in rows if row.trajectory is not None and not row.truncated and _goodness(row) >= 0]
    if played:
        best = max(played, key=lambda row: (_goodness(row), row.opinions, row.at))
        return [{"trajectory": best.trajectory}]
    rows = [row for row in rows if row.trajectory is None]
    corrected = [row for row in rows if row.better is not None]
    if corrected:
        newest = max(corrected, key=lambda row: row.at)
        return [_learnt(newest, {"role": "assistant", "content": newest.better})]
    good = [row for row in rows if row.answer is not None and not row.truncated and _goodness(row) >= 0]
    if not good:
        return []
    best = max(good, key=lambda row: (_goodness(row), row.opinions, row.at))
    return [_learnt(best, best.answer or {})]


def _dpo(rows: Sequence[Row]) -> list[Json]:
    rows = [row for row in rows if row.trajectory is None]
    pairs = [(row, row.better, row.worse) for row in rows if row.better and row.worse]
    rated = [row for row in rows if row.rating is not None and row.text is not None]
    if not pairs and rated:
        best, worst = max(rated, key=_goodness), min(rated, key=_goodness)
        if _goodness(best) > _goodness(worst):
            pairs = [(best, best.text or "", worst.text or "")]
    return [
        {**_asked(row), "chosen": chosen, "rejected": rejected} for row, chosen, rejected in pairs if chosen != rejected
    ]


def _kto(rows: Sequence[Row]) -> list[Json]:
    found: dict[str, tuple[Row, bool]] = {}
    rows = [row for row in rows if row.trajectory is None]
    for row in rows:
        if row.text is not None and row.rating:
            found[row.text] = row, row.rating > 0
    for row in rows:  # what was put side by side says more than a rating
        for text, label in ((row.worse, False), (row.better, True)):
            if text is not None:
                found[text] = row, label
    return [{**_asked(row), "completion": text, "label": label} for text, (row, label) in found.items()]


def _grpo(rows: Sequence[Row]) -> list[Json]:
    played = [row.trajectory for row in rows if row.trajectory is not None]
    if played:
        earned = {digest([one.get("reward"), [part.get("reward") for part in one["segments"]]]) for one in played}
        return [{"trajectories": played}] if len(earned) > 1 else []
    known = [row for row in rows if row.rating is not None and row.token_ids and row.prompt_token_ids]
    prompts = {tuple(row.prompt_token_ids or ()) for row in known}
    groups = []
    for prompt in sorted(prompts):
        those = [row for row in known if tuple(row.prompt_token_ids or ()) == prompt]
        if len({row.rating for row in those}) > 1:
            groups.append({"prompt_token_ids": list(prompt), "completions": [_completion(row) for row in those]})
    return groups


def _completion(row: Row) -> Json:
    completion: Json = {
        "token_ids": row.token_ids,
        "temperature": row.temperature,
        "truncated": row.truncated,
        "adapter": row.version or "base",
        "reward": row.rating,
    }
    if row.logprobs is not None and len(row.logprobs) == len(row.token_ids or ()):
        completion["logprobs"] = [min(value, 0.0) for value in row.logprobs]
    return completion


CONVERTERS: Final[Mapping[ExampleKind, Callable[[Sequence[Row]], list[Json]]]] = {
    "sft": _sft,
    "dpo": _dpo,
    "kto": _kto,
    "grpo": _grpo,
}


def _goodness(row: Row) -> float:
    return 0.0 if row.rating is None else row.rating


def _learnt(row: Row, answer: Mapping[str, Any]) -> Json:
    """An answer alone is learnt: nobody has said anything of the earlier ones. With a thought or calls it is a turn of
    the conversation, as the template writes one."""
    if not answer.get("tool_calls") and not answer.get("reasoning_content") and isinstance(answer.get("content"), str):
        return {"prompt": row.messages, "completion": answer["content"], **_tools(row)}
    turns = [{**turn, "weight": 0} if turn.get("role") == "assistant" else turn for turn in row.messages]
    return {"messages": [*turns, {key: value for key, value in answer.items() if value is not None}], **_tools(row)}


def _asked(row: Row) -> Json:
    return {"messages": row.messages, **_tools(row)}


def _tools(row: Row) -> Json:
    return {"tools": row.tools} if row.tools else {}
