"""Texts of forge runs for people: plans, results, and quality before and after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.markup import escape


def sizes(plan: Mapping[str, Any]) -> list[str]:
    """Sizes before and after, a line each."""
    lines = []
    if "parameters" in plan:
        share = 1 - plan["parameters_after"] / plan["parameters"]
        lines.append(f"  parameters  {plan['parameters']:,} → {plan['parameters_after']:,} ({share:.1%} less)")
    share = 1 - plan["bytes_after"] / plan["bytes"]
    lines.append(f"  bytes  {plan['bytes']:,} → {plan['bytes_after']:,} ({share:.1%} less)")
    return [*lines, *(f"  {name}  {before} → {after}" for name, (before, after) in plan.get("shape", {}).items())]


def planned_run(result: Mapping[str, Any]) -> str:
    """A run that was only planned."""
    plan = result["plan"]
    lines = ["nothing was written; it would be:", *sizes(plan)]
    width = max(len(stage["stage"]) for stage in plan["stages"])
    lines.append(f"  {'stage':<{width}}  {'seconds':>9}  {'memory':>10}  {'disk':>10}")
    for stage in plan["stages"]:
        disk = _bytes(stage["disk_bytes"]) if stage["disk_bytes"] else ""
        seconds = _seconds(stage["seconds"])
        lines.append(
            f"  {stage['stage']:<{width}}  {seconds:>9}  {_bytes(stage['memory_bytes']):>10}  {disk:>10}".rstrip()
        )
    lines.append(
        f"{_estimated(plan)}; memory {_bytes(plan['memory_bytes'])} of {_bytes(plan['memory_there'])}, "
        f"disk {_bytes(plan['disk_bytes'])}"
    )
    return "\n".join(lines)


def planned_recovery(result: Mapping[str, Any]) -> str:
    """A recovery that was only planned."""
    plan, examples = result["plan"], result["plan"]["examples"]
    memory = ", ".join(f"{name.replace('_', ' ')} {_bytes(count)}" for name, count in plan["memory"].items() if count)
    return "\n".join(
        (
            "nothing was written; it would be:",
            f"  parameters  {plan['parameters']:,}, of bytes {plan['bytes']:,}",
            f"  trained  {plan['trained_parameters']:,} numbers in {plan['steps']} steps, {plan['tokens']:,} tokens",
            f"  examples  {examples['learnt']} to learn from, {examples['held_out']} held out",
            f"  memory  {_bytes(plan['memory_bytes'])} of {_bytes(plan['memory_there'])}: {memory}",
            f"  disk  {_bytes(plan['disk_bytes'])}",
            _estimated(plan),
        )
    )


def recovered(result: Mapping[str, Any], where: str) -> str:
    """A recovery that has ended."""
    return "\n".join(
        (
            f"wrote [green]{escape(where)}[/]",
            f"  held-out loss  {result['held_out_before']:.4f} → {result['held_out_after']:.4f}",
            f"  steps  {result['steps']}, best after {result['best_step']}"
            f"{', stopped early' if result['stopped_early'] else ''}",
            f"  trained  {result['trained_parameters']:,} numbers on {result['tokens']:,} tokens "
            f"in {result['seconds']:.0f} s",
        )
    )


def forged(result: Mapping[str, Any], where: str) -> str:
    """A run that has ended."""
    lines = [f"wrote [green]{escape(where)}[/]", *sizes(result["plan"])]
    evaluation = result.get("evaluation")
    return "\n".join(lines if evaluation is None else [*lines, quality(evaluation)])


def quality(evaluation: Mapping[str, Any]) -> str:
    """Means with intervals, a line a suite; with the comparison, where there is one."""
    lines = []
    before, compared = evaluation.get("before"), evaluation.get("compared") or {}
    for suite, after in evaluation["after"].items():
        percent = after["better"] == "higher"
        text = f"  [bold]{escape(suite)}[/]  "
        if before is not None:
            text += f"{_mean(before[suite], percent)} → "
        text += f"{_mean(after, percent)}, {after['items']} items"
        if (pair := compared.get(suite)) is not None:
            text += f"; difference {_number(pair['gain'], percent, plus='+')} {_bounds(pair['interval'], percent)}"
            text += f", p {pair['p']:.2g}"
        lines.append(text)
    return "\n".join(lines)


def _estimated(plan: Mapping[str, Any]) -> str:
    rate = f"{plan['measured_flops'] / 1e9:,.0f} GFLOP/s"
    return f"about {_seconds(plan['seconds'])} s (estimated, from {rate} measured here)"


def _mean(summary: Mapping[str, Any], percent: bool) -> str:
    return f"{_number(summary['mean'], percent)} {_bounds(summary['interval'], percent)}".rstrip()


def _number(value: float, percent: bool, plus: str = "") -> str:
    return f"{100 * value:{plus}.1f} %" if percent else f"{value:{plus}.4f}"


def _bounds(bounds: Mapping[str, Any] | None, percent: bool) -> str:
    if bounds is None:
        return ""
    low, high = (_number(bounds[end], percent).removesuffix(" %") for end in ("low", "high"))
    return f"({low} to {high})"


def _bytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB" if count < 2**30 else f"{count / 2**30:,.1f} GiB"


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
