"""Requests that fail, come late, or wait."""

from __future__ import annotations

from observability.alerts.cases import ENGINE, GATEWAY, PLACE, fires, once, quiet, rising, series, steady
from observability.objectives import BETWEEN_TOKENS, ERRORS, FIRST_TOKEN, KV_CACHE, WAITING, Threshold
from observability.rules import Alert, Group, Recording
from observability.series import PLACE as BY
from observability.series import ours, quantile, rate, total

_WINDOWS = ("5m", "30m", "1h", "6h")
_API = 'route=~"/v1/.*"'
_READY = 'state="ready"'
_STREAMED = 'stream="true"'
"""Somebody reads along. Batches and others that wait for the whole answer may be served later."""
_FAST, _SLOW = 14.4, 6
"""Times the rate at which the budget would last for 30 days: it is gone in two days, in five.
https://sre.google/workbook/alerting-on-slos/"""
_STREAMS = {**GATEWAY, "model": "qwen3.5", "stream": "true"}
_WHOLE = {**_STREAMS, "stream": "false"}
_REQUESTS = {**GATEWAY, "method": "POST", "route": "/v1/chat/completions"}


_SCRAPED = {**ENGINE, "component": "engine"}
_TIER_FAILURES = "temper_engine_tier_failures_total"
_FAULTS = 'reason!~"missing|late"'


def _tier_failed(reason: str, values: str) -> dict[str, str]:
    return {series(_TIER_FAILURES, ENGINE, tier="store", reason=reason): values}


def _ratio(window: str) -> str:
    return f"temper:gateway_errors:ratio_rate{window}"


def _errors(window: str) -> Recording:
    failed = total(rate(ours("temper_gateway_requests_total", _API, 'status=~"5.."'), window), BY)
    everything = total(rate(ours("temper_gateway_requests_total", _API), window), BY)
    # Without any failure there is no series of one: the share is 0 then, not nothing.
    return Recording(_ratio(window), f"({failed} or 0 * {everything})\n/ {everything}")


def _burns(factor: float, long: str, short: str) -> str:
    limit = f"{factor:g} * {ERRORS}"
    return f"{_recorded(_ratio(long))} > {limit}\nand {_recorded(_ratio(short))} > {limit}"


def _recorded(name: str) -> str:
    return ours(name)


def _late(name: str, threshold: Threshold) -> str:
    """The 95th percentile of streams where it is above a threshold, and where there are enough to say."""
    slow = quantile(0.95, ours(f"{name}_bucket", _STREAMED), BY, "10m")
    everything = total(rate(ours(f"{name}_count", _STREAMED), "10m"), BY)
    return f"{slow} > {threshold}\nand {everything} > 0.05"


def _answers(failing: float) -> dict[str, str]:
    """100 requests a minute, of which so many fail."""
    return {
        series("temper_gateway_requests_total", _REQUESTS, status="200"): rising(100 - failing, minutes=500),
        series("temper_gateway_requests_total", _REQUESTS, status="503"): rising(failing, minutes=500),
    }


def _latency(name: str, seconds: float) -> dict[str, str]:
    """100 streams a minute, of which each takes from three quarters of so many seconds to all of them."""
    found: dict[str, str] = {}
    for labels, factor in ((_STREAMS, 1.0), (_WHOLE, 100.0)):  # whoever waits for a whole answer is not asked
        found |= {
            series(f"{name}_bucket", labels, le=f"{0.75 * seconds * factor:g}"): rising(0),
            series(f"{name}_bucket", labels, le=f"{seconds * factor:g}"): rising(100),
            series(f"{name}_bucket", labels, le="+Inf"): rising(100),
            series(f"{name}_count", labels): rising(100),
        }
    return found


_TTFT, _ITL = "temper_gateway_time_to_first_token_seconds", "temper_gateway_inter_token_latency_seconds"

SERVING = Group(
    "serving",
    recordings=tuple(_errors(window) for window in _WINDOWS),
    alerts=(
        Alert(
            "TemperNoEngineReady",
            f"max by ({BY}) ({ours('temper_gateway_engines', _READY)}) == 0",
            2,
            "critical",
            "No engine is ready: nothing can be served",
            "No gateway of release {{ $labels.release }} in {{ $labels.namespace }} has an engine that takes requests. "
            "Completions are answered with 503.",
            (
                fires({series("temper_gateway_engines", GATEWAY, state="ready"): steady(0)}, "5m", PLACE),
                quiet({series("temper_gateway_engines", GATEWAY, state="ready"): steady(1)}, "5m"),
            ),
        ),
        Alert(
            "TemperErrorBudgetBurnsFast",
            _burns(_FAST, "1h", "5m"),
            2,
            "critical",
            "Many requests fail",
            "{{ $value | humanizePercentage }} of the requests of the last hour were answered with a status of 500 and "
            "above; at this rate the month's budget is gone in two days.",
            (
                fires(_answers(10), "70m", PLACE, "10%"),
                quiet(_answers(5), "70m"),
                # It is over: the short window has forgotten it.
                quiet(
                    {
                        series("temper_gateway_requests_total", _REQUESTS, status="200"): rising(100),
                        series("temper_gateway_requests_total", _REQUESTS, status="503"): "0+60x60 3600x60",
                    },
                    "75m",
                ),
            ),
        ),
        Alert(
            "TemperErrorBudgetBurnsSlowly",
            _burns(_SLOW, "6h", "30m"),
            15,
            "warning",
            "Requests fail steadily",
            "{{ $value | humanizePercentage }} of the requests of the last six hours were answered with a status of "
            "500 and above; at this rate the month's budget is gone in five days.",
            (fires(_answers(5), "400m", PLACE, "5%"), quiet(_answers(2), "400m")),
        ),
        Alert(
            "TemperFirstTokenLate",
            _late(_TTFT, FIRST_TOKEN),
            10,
            "warning",
            "First tokens are late",
            "One stream in twenty waits {{ $value | humanizeDuration }} or longer for its first token.",
            (
                fires(_latency(_TTFT, 4), "30m", PLACE, "3.95s"),
                quiet(_latency(_TTFT, 2), "30m"),
            ),
        ),
        Alert(
            "TemperTokensLate",
            _late(_ITL, BETWEEN_TOKENS),
            10,
            "warning",
            "Tokens come slowly",
            "One time in twenty between two tokens of a stream is {{ $value | humanizeDuration }} or longer.",
            (
                fires(_latency(_ITL, 0.08), "30m", PLACE, "79ms"),
                quiet(_latency(_ITL, 0.04), "30m"),
            ),
        ),
        Alert(
            "TemperRequestsWait",
            f"avg by ({BY}) (avg_over_time({ours('vllm:num_requests_waiting')}[5m])) > {WAITING}",
            10,
            "warning",
            "Requests wait for the engines",
            "{{ $value | humanize }} requests wait in each engine of release {{ $labels.release }}: more come than the "
            "engines serve.",
            (
                fires({series("vllm:num_requests_waiting", _SCRAPED): steady(40)}, "30m", PLACE, "40"),
                quiet({series("vllm:num_requests_waiting", _SCRAPED): steady(4)}, "30m"),
                quiet({series("vllm:num_requests_waiting", _SCRAPED): "4x10 90x3 4x60"}, "20m"),
            ),
        ),
        Alert(
            "TemperKvCacheFull",
            f"{ours('vllm:kv_cache_usage_perc')} > {KV_CACHE}",
            10,
            "warning",
            "An engine's KV cache is full",
            "Live sequences use {{ $value | humanizePercentage }} of the KV blocks of {{ $labels.pod }}: new ones "
            "wait, and running ones may be computed again.",
            (
                fires({series("vllm:kv_cache_usage_perc", _SCRAPED): steady(0.99)}, "15m", _SCRAPED, "99%"),
                quiet({series("vllm:kv_cache_usage_perc", _SCRAPED): steady(0.9)}, "15m"),
            ),
        ),
        Alert(
            "TemperPreemptions",
            f"rate({ours('temper_engine_preemptions_total')}[10m]) > 0.1",
            15,
            "warning",
            "An engine computes sequences again",
            "{{ $labels.pod }} takes blocks from {{ $value | humanize }} running sequences a second and computes them "
            "again later: KV is too small for what runs.",
            (
                fires({series("temper_engine_preemptions_total", ENGINE): rising(30)}, "40m", ENGINE, "500m"),
                quiet({series("temper_engine_preemptions_total", ENGINE): rising(1)}, "40m"),
            ),
        ),
        Alert(
            "TemperTierFails",
            f"sum by ({BY}, pod, tier, reason) (increase({ours(_TIER_FAILURES, _FAULTS)}[10m])) > 0",
            15,
            "warning",
            "A tier of the prefix cache fails",
            "{{ $labels.pod }} could not read or write {{ $value | humanize }} copies in its tier {{ $labels.tier }} "
            "({{ $labels.reason }}) in ten minutes. Prompts are computed again instead.",
            (
                fires(_tier_failed("away", rising(1)), "40m", {**ENGINE, "tier": "store", "reason": "away"}, "10"),
                quiet(_tier_failed("away", once(0, 5, 3)), "22m"),
                # Another engine, or whoever deletes a session, may remove what this one still knows of.
                quiet(_tier_failed("missing", rising(1)), "40m"),
                # Computing was faster: that is what a load is measured against.
                quiet(_tier_failed("late", rising(1)), "40m"),
            ),
        ),
        Alert(
            "TemperStepsFail",
            f"increase({ours('temper_engine_failed_steps_total')}[10m]) > 0",
            0,
            "critical",
            "Engine steps fail",
            "{{ $labels.pod }} had failed steps in the last ten minutes; every request in one ended with an error.",
            (
                fires({series("temper_engine_failed_steps_total", ENGINE): once(0, 5, 2)}, "8m", ENGINE),
                quiet({series("temper_engine_failed_steps_total", ENGINE): once(0, 5, 2)}, "30m"),
            ),
        ),
        Alert(
            "TemperBreakerOpen",
            f"max by ({BY}, engine) ({ours('temper_gateway_engine_breaker')}) == 2",
            2,
            "warning",
            "An engine gets no requests because too many failed",
            "Gateways send nothing to {{ $labels.engine }} but a request now and then to try it.",
            (
                fires(
                    {series("temper_gateway_engine_breaker", GATEWAY, engine="10.0.0.7:50051"): steady(2)},
                    "5m",
                    {**PLACE, "engine": "10.0.0.7:50051"},
                ),
                quiet({series("temper_gateway_engine_breaker", GATEWAY, engine="10.0.0.7:50051"): steady(0)}, "5m"),
            ),
        ),
    ),
)
