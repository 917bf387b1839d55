"""Which versions serve, and how swaps go."""

from __future__ import annotations

from observability.board import Board, Panel, Query, Row
from observability.series import chosen, quantile, rate, total

_PHASES = "temper_engine_adapter_load_seconds"

_GLANCE = Row(
    "At a glance",
    (
        Panel(
            "Attached versions",
            "How many versions answer under the base model's name. More than one for long: an engine does not follow.",
            (Query(f"count(count by (adapter) ({chosen('temper_engine_attached_adapter')}))"),),
            kind="number",
            width=6,
            steps=((2, "red"),),
            alerts=("TemperEnginesDisagree",),
        ),
        Panel(
            "Slots in use",
            "The fullest engine's share of adapter slots that hold a published version. Idle ones make room.",
            (Query(f"max({chosen('temper_engine_adapters_loaded')} / {chosen('temper_engine_adapter_slots')})"),),
            kind="number",
            unit="percentunit",
            width=6,
            base="blue",
        ),
        Panel(
            "Failed loads",
            "In the last hour. missing: a client named a version that does not exist.",
            (Query(f"sum(increase({chosen('temper_engine_adapter_load_failures_total')}[1h]))"),),
            kind="number",
            width=6,
            decimals=0,
            steps=((1, "yellow"),),
            alerts=("TemperAdapterLoadsFail",),
        ),
        Panel(
            "Upload and flip, p95",
            "The parts of a swap that are beside running requests.",
            (Query(quantile(0.95, chosen(f"{_PHASES}_bucket", 'phase=~"upload|flip"'), "phase"), "{{phase}}"),),
            kind="number",
            unit="s",
            width=6,
            steps=((1, "yellow"), (10, "red")),
        ),
    ),
)

_VERSIONS = Row(
    "Versions",
    (
        Panel(
            "Attached",
            "The version that answers under the base model's name, by engine.",
            (Query(f"max by (pod, adapter) ({chosen('temper_engine_attached_adapter')})"),),
            kind="table",
            width=8,
            alerts=("TemperEnginesDisagree",),
        ),
        Panel(
            "Drafts",
            "The version of the followed drafter that proposes tokens, by engine; own: the checkpoint's layer does.",
            (Query(f"max by (pod, drafter) ({chosen('temper_engine_drafter')})"),),
            kind="table",
            width=8,
        ),
        Panel(
            "In slots",
            "Versions in each engine's slots and the requests pinned to them.",
            (Query(f"max by (pod, adapter) ({chosen('temper_engine_adapter_requests')})"),),
            kind="table",
            width=8,
        ),
        Panel(
            "What routers see",
            "Adapters in slots and adapters that requests wait for, as routers read them.",
            (
                Query(
                    "count by (pod, max_lora, running_lora_adapters, waiting_lora_adapters) "
                    f"({chosen('vllm:lora_requests_info')})"
                ),
            ),
            kind="table",
            width=8,
        ),
        Panel(
            "Requests by version",
            "Pinned to each version that is in a slot.",
            (Query(total(chosen("temper_engine_adapter_requests"), "adapter"), "{{adapter}}"),),
            kind="stack",
            width=12,
            low=0,
        ),
        Panel(
            "Loaded versions",
            "Published versions in slots, and slots, by engine.",
            (
                Query(chosen("temper_engine_adapters_loaded"), "{{pod}} loaded"),
                Query(chosen("temper_engine_adapter_slots"), "{{pod}} slots"),
            ),
            width=12,
            low=0,
        ),
    ),
)

_SWAPS = Row(
    "Swaps",
    (
        Panel(
            "Parts of a swap, p95",
            "download: from the object store; bind: read and checked; upload: into a slot; flip: names moved between "
            "two steps.",
            (Query(quantile(0.95, chosen(f"{_PHASES}_bucket"), "phase"), "{{phase}}"),),
            unit="s",
            low=0,
        ),
        Panel(
            "Swaps",
            "Uploads into slots and flips of names, a second.",
            (Query(total(rate(chosen(f"{_PHASES}_count", 'phase=~"upload|flip"')), "phase"), "{{phase}}"),),
            unit="ops",
            low=0,
        ),
        Panel(
            "Failed loads by reason",
            "A second.",
            (Query(total(rate(chosen("temper_engine_adapter_load_failures_total")), "reason"), "{{reason}}"),),
            unit="ops",
            low=0,
            alerts=("TemperAdapterLoadsFail",),
        ),
    ),
)

ADAPTERS = Board(
    "adapters",
    "Temper / Adapters",
    "Versions in the engines, what uses them, and how they get there.",
    (_GLANCE, _VERSIONS, _SWAPS),
)
