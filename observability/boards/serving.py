"""Serving dashboard: requests, from the client's side down to the engine's steps."""

from __future__ import annotations

from observability.board import Board, Panel, Query, Row
from observability.objectives import BETWEEN_TOKENS, ERRORS, FIRST_TOKEN
from observability.series import chosen, everywhere, quantile, rate, total

_REQUESTS = "temper_gateway_requests_total"
_OF_API = 'route=~"/v1/.*"'
_READY = 'state="ready"'
_FAILED = 'status=~"5.."'


def _quantiles(name: str, by: str = "") -> tuple[Query, ...]:
    legend = f" {{{{{by}}}}}" if by else ""
    buckets = chosen(f"{name}_bucket")
    return tuple(Query(quantile(share, buckets, by), f"p{share * 100:g}{legend}", True) for share in (0.5, 0.95, 0.99))


_GLANCE = Row(
    "At a glance",
    (
        Panel(
            "Engines ready",
            "Engines that the gateways can send requests to. Red: nothing can be served.",
            (Query(f"max({everywhere('temper_gateway_engines', _READY)})"),),
            kind="number",
            width=3,
            base="red",
            steps=((1, "green"),),
            alerts=("TemperNoEngineReady", "TemperEngineDown"),
        ),
        Panel(
            "Requests",
            "Requests to the API a second.",
            (Query(total(rate(chosen(_REQUESTS, _OF_API)))),),
            kind="number",
            unit="reqps",
            width=3,
            base="blue",
        ),
        Panel(
            "Errors",
            "Share of requests answered with a status of 500 and above, by any gateway.",
            (
                Query(
                    f"({total(rate(chosen(_REQUESTS, _OF_API, _FAILED)))} or vector(0)) / "
                    f"{total(rate(chosen(_REQUESTS, _OF_API)))}"
                ),
            ),
            kind="number",
            unit="percentunit",
            width=3,
            steps=((ERRORS.value, "yellow"), (10 * ERRORS.value, "red")),
            alerts=("TemperErrorBudgetBurnsFast", "TemperErrorBudgetBurnsSlowly"),
        ),
        Panel(
            "First token, p95",
            "95 % of completions have their first token within this time, as the gateway measures it.",
            (Query(quantile(0.95, chosen("temper_gateway_time_to_first_token_seconds_bucket"))),),
            kind="number",
            unit="s",
            width=3,
            steps=((FIRST_TOKEN.value, "red"),),
            alerts=("TemperFirstTokenLate",),
        ),
        Panel(
            "Between tokens, p95",
            "95 % of the times between two tokens of an answer are below this.",
            (Query(quantile(0.95, chosen("temper_gateway_inter_token_latency_seconds_bucket"))),),
            kind="number",
            unit="s",
            width=3,
            steps=((BETWEEN_TOKENS.value, "red"),),
            alerts=("TemperTokensLate",),
        ),
        Panel(
            "Answer tokens",
            "Tokens of answers a second, of all engines.",
            (Query(total(rate(chosen("temper_engine_tokens_total", 'kind="decode"')))),),
            kind="number",
            unit="short",
            width=3,
            base="blue",
        ),
        Panel(
            "Waiting",
            "Requests that wait for their first step, or for their adapter to load.",
            (Query(total(chosen("vllm:num_requests_waiting"))),),
            kind="number",
            width=3,
            steps=((16, "yellow"), (64, "red")),
            alerts=("TemperRequestsWait",),
        ),
        Panel(
            "KV cache",
            "The fullest engine's share of KV blocks that live sequences use.",
            (Query(f"max({chosen('vllm:kv_cache_usage_perc')})"),),
            kind="number",
            unit="percentunit",
            width=3,
            steps=((0.8, "yellow"), (0.95, "red")),
            alerts=("TemperKvCacheFull",),
        ),
    ),
)

_LATENCY = Row(
    "Latency",
    (
        Panel(
            "Time to first token",
            "From a request's arrival at the gateway to its first token. Points are traces.",
            _quantiles("temper_gateway_time_to_first_token_seconds"),
            unit="s",
            low=0,
            steps=((FIRST_TOKEN.value, "red"),),
            alerts=("TemperFirstTokenLate",),
        ),
        Panel(
            "Time between tokens",
            "Between two updates of an answer, divided by their tokens. Training beside it shows here first.",
            _quantiles("temper_gateway_inter_token_latency_seconds"),
            unit="s",
            low=0,
            steps=((BETWEEN_TOKENS.value, "red"),),
            alerts=("TemperTokensLate",),
        ),
        Panel(
            "Whole answers",
            "From a request's arrival to its last token; long answers take long.",
            _quantiles("temper_gateway_completion_duration_seconds"),
            unit="s",
            low=0,
        ),
        Panel(
            "Waiting for the first step",
            "From an engine's acceptance of a request to its first step.",
            _quantiles("temper_engine_queue_seconds"),
            unit="s",
            low=0,
            alerts=("TemperRequestsWait",),
        ),
        Panel(
            "Requests by route, p95",
            "From the first byte of a request to the last of its response.",
            (
                Query(
                    quantile(0.95, chosen("temper_gateway_request_duration_seconds_bucket", _OF_API), "route"),
                    "{{route}}",
                    True,
                ),
            ),
            unit="s",
            low=0,
        ),
        Panel(
            "Engine: mean time per token",
            "Of each request after its first token, without the gateway and the network.",
            _quantiles("temper_engine_time_per_output_token_seconds"),
            unit="s",
            low=0,
        ),
    ),
)

_LOAD = Row(
    "Load",
    (
        Panel(
            "Requests by status",
            "Answers of the API a second; 499 is a client that left, 429 a limit of its key.",
            (Query(total(rate(chosen(_REQUESTS, _OF_API)), "status"), "{{status}}"),),
            kind="stack",
            unit="reqps",
            low=0,
            alerts=("TemperErrorBudgetBurnsFast",),
        ),
        Panel(
            "Running and waiting",
            "Requests in each engine.",
            (
                Query(total(chosen("vllm:num_requests_running"), "pod"), "{{pod}} running"),
                Query(total(chosen("vllm:num_requests_waiting"), "pod"), "{{pod}} waiting"),
            ),
            low=0,
            alerts=("TemperRequestsWait",),
        ),
        Panel(
            "Tokens",
            "Computed a second: of prompts (prefill) and of answers (decode), and prompt tokens found in the cache.",
            (
                Query(total(rate(chosen("temper_engine_tokens_total")), "kind"), "{{kind}}"),
                Query(total(rate(chosen("temper_engine_cached_tokens_total"))), "cached"),
            ),
            low=0,
        ),
        Panel(
            "How answers end",
            "stop: at the end of the text; length: at max_tokens; abort: the client left; error: see the log.",
            (Query(total(rate(chosen("temper_engine_requests_total")), "finish_reason"), "{{finish_reason}}"),),
            kind="stack",
            unit="reqps",
            low=0,
        ),
        Panel(
            "Refused",
            "Requests refused for their API key or one of its limits, a second.",
            (
                Query(total(rate(chosen("temper_gateway_auth_refusals_total")), "reason"), "key {{reason}}"),
                Query(total(rate(chosen("temper_gateway_rate_limited_total")), "limit"), "limit {{limit}}"),
            ),
            unit="reqps",
            low=0,
        ),
        Panel(
            "In the gateways",
            "Completions and background responses that a gateway holds.",
            (
                Query(chosen("temper_gateway_in_flight"), "{{pod}} completions"),
                Query(chosen("temper_gateway_background_responses"), "{{pod}} background"),
            ),
            low=0,
        ),
    ),
)

_MEMORY = Row(
    "Cache",
    (
        Panel(
            "KV cache by engine",
            "Share of each engine's blocks that live sequences use. Full: requests wait, or lose their blocks.",
            (Query(chosen("vllm:kv_cache_usage_perc"), "{{pod}}"),),
            unit="percentunit",
            low=0,
            high=1,
            steps=((0.95, "red"),),
            alerts=("TemperKvCacheFull",),
        ),
        Panel(
            "Blocks",
            "KV blocks of live sequences, of the prefix cache alone, and all.",
            (
                Query(total(chosen("temper_engine_blocks_used")), "used"),
                Query(total(chosen("temper_engine_blocks_cached")), "cached"),
                Query(total(chosen("temper_engine_blocks_total")), "all"),
            ),
            low=0,
        ),
        Panel(
            "State slots",
            "Recurrent states of live sequences and of prefix snapshots, and all.",
            (
                Query(total(chosen("temper_engine_slots_used")), "used"),
                Query(total(chosen("temper_engine_slots_cached")), "cached"),
                Query(total(chosen("temper_engine_slots_total")), "all"),
            ),
            low=0,
        ),
        Panel(
            "Preemptions",
            "Sequences a second that lost their blocks and were computed again.",
            (Query(total(rate(chosen("temper_engine_preemptions_total")), "pod"), "{{pod}}"),),
            unit="ops",
            low=0,
            alerts=("TemperPreemptions",),
        ),
        Panel(
            "Draft tokens that were accepted",
            "With speculation on, of those that were checked. None are drawn where they cost more than they save.",
            (
                Query(
                    f"{total(rate(chosen('vllm:spec_decode_num_accepted_tokens_total')), 'pod')} / "
                    f"{total(rate(chosen('vllm:spec_decode_num_draft_tokens_total')), 'pod')}",
                    "{{pod}}",
                ),
            ),
            unit="percentunit",
            low=0,
            high=1,
        ),
    ),
)

_TIERS = Row(
    "Prefix cache",
    (
        Panel(
            "Prefix hits",
            "Share of prompt tokens that were computed before. Sessions and common beginnings raise it.",
            (
                Query(
                    f"{total(rate(chosen('temper_engine_cached_tokens_total')), 'pod')} / "
                    f"{total(rate(chosen('temper_engine_prompt_tokens_total')), 'pod')}",
                    "{{pod}}",
                ),
            ),
            unit="percentunit",
            low=0,
            high=1,
        ),
        Panel(
            "Hits by tier",
            "Prompt tokens a second that were found on the device, or loaded from a tier below it.",
            (Query(total(rate(chosen("temper_engine_cache_hit_tokens_total")), "tier"), "{{tier}}"),),
            kind="stack",
            low=0,
        ),
        Panel(
            "Computing saved",
            "Seconds of prefill that hits save each second, less the time of their loads, by where they were.",
            (Query(total(rate(chosen("temper_engine_cache_saved_seconds_total")), "tier"), "{{tier}}"),),
            kind="stack",
            unit="s",
            low=0,
        ),
        Panel(
            "Kept in tiers",
            "Bytes below the devices, and how many there may be. Full is as it should be: the least useful goes first.",
            (
                Query(total(chosen("temper_engine_tier_bytes"), "tier"), "{{tier}}"),
                Query(total(chosen("temper_engine_tier_limit_bytes"), "tier"), "{{tier}} limit"),
            ),
            unit="bytes",
            low=0,
        ),
        Panel(
            "Loads from tiers, p95",
            "95 % of the loads to the device take less. One is begun only where computing would take longer.",
            (
                Query(
                    quantile(0.95, chosen("temper_engine_tier_load_seconds_bucket"), "tier"),
                    "{{tier}}",
                ),
            ),
            unit="s",
            low=0,
        ),
        Panel(
            "Tier failures",
            "Copies a second that could not be read or written. Each costs computing again, and nothing else.",
            (Query(total(rate(chosen("temper_engine_tier_failures_total")), "tier, reason"), "{{tier}} {{reason}}"),),
            unit="ops",
            low=0,
            alerts=("TemperTierFails",),
        ),
        Panel(
            "Loaded",
            "Bytes a second from each tier to the devices.",
            (Query(total(rate(chosen("temper_engine_tier_loaded_bytes_total")), "tier"), "{{tier}}"),),
            unit="bytes",
            low=0,
        ),
        Panel(
            "Written",
            "Bytes a second into each tier.",
            (Query(total(rate(chosen("temper_engine_tier_saved_bytes_total")), "tier"), "{{tier}}"),),
            unit="bytes",
            low=0,
        ),
        Panel(
            "Given up",
            "Bytes a second that made room for others. Much of it, and few hits: the tier is too small.",
            (Query(total(rate(chosen("temper_engine_cache_evicted_bytes_total")), "tier"), "{{tier}}"),),
            unit="bytes",
            low=0,
        ),
    ),
)

_ENGINE = Row(
    "Steps and routing",
    (
        Panel(
            "Steps",
            "Duration of engine steps, with the training slice before each; compute is without it.",
            (
                Query(quantile(0.95, chosen("temper_engine_step_seconds_bucket")), "step p95"),
                Query(quantile(0.95, chosen("temper_engine_compute_seconds_bucket")), "compute p95"),
                Query(quantile(0.95, chosen("temper_engine_mask_seconds_bucket")), "masks p95"),
            ),
            unit="s",
            low=0,
        ),
        Panel(
            "Failed steps",
            "Steps a second that failed; every request in one ends with an error.",
            (Query(total(rate(chosen("temper_engine_failed_steps_total")), "pod"), "{{pod}}"),),
            unit="ops",
            low=0,
            alerts=("TemperStepsFail",),
        ),
        Panel(
            "Grammars",
            "Constraints of requests: cached, compiled, refused, or the compiler overloaded.",
            (Query(total(rate(chosen("temper_engine_grammars_total")), "result"), "{{result}}"),),
            unit="ops",
            low=0,
        ),
        Panel(
            "What routed",
            "What decided which engine a request went to.",
            (Query(total(rate(chosen("temper_gateway_routed_total")), "by"), "{{by}}"),),
            kind="stack",
            unit="reqps",
            low=0,
        ),
        Panel(
            "Sent again",
            "Requests that an engine refused or lost before their first token, and another one got.",
            (Query(total(rate(chosen("temper_gateway_retries_total")), "reason"), "{{reason}}"),),
            unit="reqps",
            low=0,
            alerts=("TemperBreakerOpen",),
        ),
        Panel(
            "Breakers and load",
            "Of each engine as the gateways see it. Breaker: 0 closed, 1 half open, 2 open.",
            (
                Query(f"max by (engine) ({everywhere('temper_gateway_engine_breaker')})", "{{engine}} breaker"),
                Query(f"max by (engine) ({everywhere('temper_gateway_engine_load')})", "{{engine}} load"),
            ),
            low=0,
            alerts=("TemperBreakerOpen",),
        ),
    ),
)

SERVING = Board(
    "serving",
    "Temper / Serving",
    "Requests, their latency, and the engines behind them.",
    (_GLANCE, _LATENCY, _LOAD, _MEMORY, _TIERS, _ENGINE),
)
