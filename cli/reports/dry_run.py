"""Text of a dry run: counts, what is trained with it marked, rewards, time, memory, capacity, warnings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.markup import escape


def dry_run(job: Mapping[str, Any]) -> str:
    """The report of a job that has ended, as rich markup."""
    report = job["report"]
    lines = ["nothing was published; it would be:", _counts(report["counts"])]
    if job.get("parent"):
        lines.append(f"  goes on from  {escape(job['parent'])}")
    settings = "  ".join(f"{key} {value:.4g}" for key, value in job["settings"].items())
    lines.append(f"  settings  {settings}")
    time, memory = report["time"], report["memory"]
    lines.append(f"  time  {_seconds(time['seconds'])} for {time['steps']} steps: {escape(time['basis'])}")
    lines.append(f"  memory  {_mib(memory['needed'])} of {_mib(memory['available'])}: {escape(memory['basis'])}")
    if (capacity := report.get("capacity")) is not None:
        lines.append(
            f"  capacity  {capacity['capacity_bits']:.3g} bits in {capacity['parameters']:,} numbers, "
            f"{capacity['data_bits']:.3g} bits to learn: {escape(capacity['basis'])}"
        )
    if (found := report.get("saturation")) is not None:
        lines.append(f"  right already  {found['share']:.1%} of {found['measured']} {escape(found['of'])}")
    if (rewards := report.get("rewards")) is not None:
        lines += _rewards(rewards)
    lines += ["", "what is trained is between ⟦ and ⟧:"]
    lines += [_shown(one) for one in report["samples"]]
    lines += [f"[yellow]warning:[/] {escape(one)}" for one in report["warnings"]]
    others = [one for one in job.get("notes") or () if one not in report["warnings"]]
    return "\n".join([*lines, *(f"[dim]note:[/] {escape(one)}" for one in others)])


def _counts(counts: Mapping[str, Any]) -> str:
    gone = "".join(f", {counts[name]} {name}" for name in ("dropped", "truncated") if counts[name])
    held = f", {counts['held_out']} held out" if counts["held_out"] else ""
    return (
        f"  {counts['unit']}s  {counts['kept']} of {counts['given']}{gone}{held}\n"
        f"  tokens  {counts['tokens']:,} in {counts['documents']} documents, {counts['trained_tokens']:,} of them "
        f"trained, the longest has {counts['longest']:,}"
    )


def _rewards(rewards: Mapping[str, Any]) -> list[str]:
    lines = [
        f"  rewards  {rewards['mean']:.3g} ± {rewards['std']:.3g}; {rewards['groups_skipped']} of {rewards['groups']} "
        "groups have equal rewards"
    ]
    for number, group in enumerate(rewards["by_group"]):
        lines.append(
            f"    group {number}  {group['mean']:.3g} ± {group['std']:.3g}, {group['least']:.3g} to "
            f"{group['most']:.3g}, {group['completions']} completions"
        )
    return lines


def _shown(document: Mapping[str, Any]) -> str:
    text = "".join(
        f"[bold green]⟦{escape(span['text'])}⟧[/]" if span["trained"] else f"[dim]{escape(span['text'])}[/]"
        for span in document["spans"]
    )
    cut = ", cut in the middle" if document["cut"] else ""
    head = f"#{document['source']}: {document['trained_tokens']} of {document['tokens']} tokens{cut}"
    return f"[bold]{head}[/]\n{text}\n"


def _seconds(seconds: float) -> str:
    return (
        f"{seconds:.1f} s"
        if seconds < 120
        else f"{seconds / 60:.1f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
