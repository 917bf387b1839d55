"""Generated parts of the guides about metrics, dashboards and alerts."""

from __future__ import annotations

from observability.alerts import GROUPS
from observability.boards import BOARDS
from observability.catalogue import Exported, exported
from observability.foreign import FOREIGN

_HEADER = """# Metrics

<!-- Written by `python -m observability.generate`; change the code that exports them, not this file. -->

Gateways export metrics at `/metrics` of their port, engines at `/metrics` of `TEMPER_METRICS_PORT`. What each is good
for: [monitoring.md](monitoring.md). No label has values that clients can make up without bound: there are no users, job
ids or prompts in them, and names of adapter versions only while they are in one of an engine's slots.

A histogram `x` is exported as `x_bucket`, `x_sum` and `x_count`; a counter's name ends in `_total`. Series that begin
with `vllm:` are the engine's own under the names that routers and dashboards for vLLM read. Its time per output token
is the mean of a request, under all three names that vLLM has had for it. A gateway has those that endpoint pickers read
if `TEMPER_ENGINES` is the address of one engine: that engine's, asked for at each scrape, and none while it does not
answer.
"""
_SERVICES = {
    "gateway": "Gateway",
    "engine": "Engine and trainer",
    "tls": "Both, where they have certificates",
}


def metrics() -> str:
    """docs/guides/metrics.md."""
    found = exported()
    parts = [_HEADER]
    for service, title in _SERVICES.items():
        parts.append(f"\n## {title}\n\n| metric | type | labels | |\n|---|---|---|---|\n")
        parts += [_row(metric) for metric in found if metric.service == service]
    parts.append(
        "\n## Of others\n\nWhat the dashboards and alerts ask for besides; without it those panels are empty.\n\n"
    )
    parts.append("| exporter | series |\n|---|---|\n")
    parts += [
        f"| [{other.source}]({other.reference}) | {', '.join(f'`{name}`' for name in other.series)} |\n"
        for other in FOREIGN
    ]
    return "".join(parts)


def with_tables(page: str) -> str:
    """docs/guides/monitoring.md with current tables of dashboards and alerts.

    Raises:
        ValueError: a marker is missing.
    """
    for name, table in (("dashboards", _dashboards()), ("alerts", _alerts())):
        begin, end = f"<!-- {name}: written by `python -m observability.generate` -->\n", f"<!-- end of {name} -->"
        before, found, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"docs/guides/monitoring.md needs the lines {begin.strip()!r} and {end!r}")
        page = f"{before}{begin}{table}{end}{after}"
    return page


def _row(metric: Exported) -> str:
    name = metric.sample_names[0] if metric.kind == "counter" else metric.name
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{name}` | {metric.kind} | {labels} | {metric.text.replace('|', chr(92) + '|')} |\n"


def _dashboards() -> str:
    rows = [f"| {board.title} | {', '.join(row.title.lower() for row in board.rows)} |\n" for board in BOARDS]
    return "".join(["| dashboard | rows |\n|---|---|\n", *rows])


def _alerts() -> str:
    rows = [
        f"| [{alert.name}](../runbooks/{alert.name}.md) | {alert.severity} | {alert.summary} | {alert.minutes} min |\n"
        for group in GROUPS
        for alert in group.alerts
    ]
    return "".join(["| alert | severity | | after |\n|---|---|---|---|\n", *rows])
