"""Exports of an engine, as Prometheus reads them."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from services.engine.kv_cache.keys import Tier
from services.engine.kv_cache.memory_plan import MemoryPlan
from services.engine.observability.events import (
    AdapterLoadFailed,
    AdapterPhaseDone,
    CopyEvicted,
    CopyLoaded,
    CopyNotMade,
    CopySaved,
    RequestDone,
)
from services.engine.observability.exports import Sources, export
from services.engine.observability.metrics import EngineMetrics
from services.engine.observability.offload_metrics import TierCollector
from services.engine.observability.status import AdapterSnapshot, Counts, LoopStatus, TierStatus
from services.engine.requests.adapter import BASE_PIN
from services.engine.requests.outputs import Finished
from services.engine.requests.request import FinishReason, Request
from services.engine.requests.sampling_params import SamplingParams

PLAN = MemoryPlan(
    budget=1000, weights=400, workspace=50, states=60, adapters=70, kv=200, training=100, num_blocks=21, block_size=16,
    sampler=5, graphs=15,
)  # fmt: skip
COUNTS = Counts(2, 1, 5, 3, 20, 2, 1, 9, 4)

Scraped = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(metrics: EngineMetrics) -> Scraped:
    text = generate_latest(metrics.registry).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def metrics() -> EngineMetrics:
    metrics = EngineMetrics(CollectorRegistry())
    sources = Sources(
        model_name="qwen",
        status=lambda: LoopStatus(COUNTS, 0, True, False, 7, 0),
        adapters=lambda: AdapterSnapshot("", ()),
        training=lambda: False,
        adapter_slots=8,
        memory=PLAN,
        device_memory=lambda: {"total": 2000, "reserved": 900},
        training_waited=lambda: 1.5,
    )
    export(metrics, sources)
    return metrics


def finished(prompt: int, output: int, *, cached: int, ran: bool = True) -> Finished:
    request = Request("r", (1,) * prompt, SamplingParams(max_tokens=9), BASE_PIN)
    at = 10.5 if ran else None
    first = 11.0 if ran else None
    reason = FinishReason.STOP if ran else FinishReason.ABORT
    return Finished(request, [1] * output, [], reason, cached, 0, at, first)  # type: ignore[arg-type]


def test_a_request_is_counted_once_and_shown_under_both_names(metrics: EngineMetrics) -> None:
    metrics.listen(RequestDone(finished(100, 5, cached=64), submitted_at=10.0, now=13.0))
    metrics.listen(RequestDone(finished(30, 0, cached=0, ran=False), submitted_at=10.0, now=10.0))
    found = scrape(metrics)
    vllm = {("model_name", "qwen"), ("engine", "0")}
    for ours, theirs, value in (
        ("temper_engine_prompt_tokens_total", "vllm:prompt_tokens_total", 100),
        ("temper_engine_prompt_tokens_total", "vllm:prefix_cache_queries_total", 100),
        ("temper_engine_cached_tokens_total", "vllm:prefix_cache_hits_total", 64),
        ("temper_engine_output_tokens_total", "vllm:generation_tokens_total", 5),
        ("temper_engine_time_to_first_token_seconds_sum", "vllm:time_to_first_token_seconds_sum", 1.0),
        ("temper_engine_time_per_output_token_seconds_sum", "vllm:request_time_per_output_token_seconds_sum", 0.5),
        ("temper_engine_request_seconds_sum", "vllm:e2e_request_latency_seconds_sum", 3.0),
        ("temper_engine_queue_seconds_count", "vllm:request_queue_time_seconds_count", 1),
        ("temper_engine_prefill_seconds_sum", "vllm:request_prefill_time_seconds_sum", 0.5),
        ("temper_engine_decode_seconds_sum", "vllm:request_decode_time_seconds_sum", 2.0),
        ("temper_engine_inference_seconds_sum", "vllm:request_inference_time_seconds_sum", 2.5),
        ("temper_engine_request_prompt_tokens_sum", "vllm:request_prompt_tokens_sum", 100),
        ("temper_engine_request_output_tokens_sum", "vllm:request_generation_tokens_sum", 5),
        ("temper_engine_step_tokens_count", "vllm:iteration_tokens_total_count", 0),
    ):
        assert found[ours, frozenset()] == found[theirs, frozenset(vllm)] == value
    assert found["vllm:request_success_total", frozenset({*vllm, ("finished_reason", "stop")})] == 1
    bucket = {*vllm, ("le", "1.0")}
    assert found["vllm:time_to_first_token_seconds_bucket", frozenset(bucket)] == 1


def test_who_has_the_memory(metrics: EngineMetrics) -> None:
    found = scrape(metrics)
    owners = {dict(labels)["owner"]: v for (name, labels), v in found.items() if name.endswith("memory_plan_bytes")}
    assert owners["weights"] == 400
    assert owners["free"] == 100
    assert sum(owners.values()) == PLAN.budget
    assert found["temper_engine_device_memory_bytes", frozenset({("kind", "reserved")})] == 900


def test_state_that_is_read_at_the_scrape(metrics: EngineMetrics) -> None:
    found = scrape(metrics)
    assert found["temper_engine_ready", frozenset()] == 0
    assert found["temper_engine_draining", frozenset()] == 1
    assert found["temper_engine_attached_adapter", frozenset({("adapter", "base")})] == 1
    assert found["temper_trainer_gate_wait_seconds_total", frozenset()] == 1.5
    config = frozenset({("block_size", "16"), ("num_gpu_blocks", "20"), ("engine", "0")})
    assert found["vllm:cache_config_info", config] == 1


def test_each_process_says_which_version_it_is(metrics: EngineMetrics) -> None:
    (build,) = [dict(labels) for name, labels in scrape(metrics) if name == "temper_build_info"]
    assert build.keys() == {"version", "service"}
    assert build["service"] == "engine"


def test_swaps_are_measured_by_phase(metrics: EngineMetrics) -> None:
    assert scrape(metrics)["temper_engine_adapter_load_failures_total", frozenset({("reason", "rejected")})] == 0
    metrics.listen(AdapterPhaseDone("upload", 0.02))
    metrics.listen(AdapterLoadFailed("rejected"))
    found = scrape(metrics)
    assert found["temper_engine_adapter_load_seconds_count", frozenset({("phase", "upload")})] == 1
    assert found["temper_engine_adapter_load_failures_total", frozenset({("reason", "rejected")})] == 1


def test_tiers_have_all_their_series_from_the_start() -> None:
    found = {
        (name, dict(labels).get("tier"), dict(labels).get("reason")): value
        for (name, labels), value in scrape(EngineMetrics(CollectorRegistry())).items()
        if not name.endswith("_created")
    }
    for tier in ("device", "host", "disk", "store"):
        for name in ("cache_hit_tokens_total", "cache_saved_seconds_total", "cache_evicted_bytes_total"):
            assert found[f"temper_engine_{name}", tier, None] == 0
    for tier in ("host", "disk", "store"):
        for name in ("loaded_bytes_total", "saved_bytes_total", "load_seconds_count", "save_seconds_count"):
            assert found[f"temper_engine_tier_{name}", tier, None] == 0
        for reason in ("damaged", "missing", "unreadable", "full", "slow", "away", "late"):
            assert found["temper_engine_tier_failures_total", tier, reason] == 0


def test_what_moves_between_tiers_is_counted(metrics: EngineMetrics) -> None:
    metrics.tiers.hit(None, 640, 0.5)
    metrics.tiers.hit(Tier.DISK, 64, 2.0)
    metrics.tiers.hit(Tier.DISK, 64, -1.0)
    metrics.listen(CopyLoaded(Tier.HOST, 1000, 0.02))
    metrics.listen(CopySaved(Tier.STORE, 2000, 0.3))
    metrics.listen(CopyNotMade(Tier.STORE, "away"))
    metrics.tiers.evicted(None, 10)
    metrics.listen(CopyEvicted(Tier.HOST, 20))
    found = scrape(metrics)

    def of(name: str, tier: str, **labels: str) -> float:
        return found[f"temper_engine_{name}", frozenset({("tier", tier), *labels.items()})]

    assert (of("cache_hit_tokens_total", "device"), of("cache_hit_tokens_total", "disk")) == (640, 128)
    assert of("cache_saved_seconds_total", "disk") == 2.0, "a load that did not pay saved nothing, and costs no other's"
    assert of("cache_saved_seconds_total", "device") == 0.5
    assert (of("tier_loaded_bytes_total", "host"), of("tier_load_seconds_sum", "host")) == (1000, 0.02)
    assert (of("tier_saved_bytes_total", "store"), of("tier_save_seconds_sum", "store")) == (2000, 0.3)
    assert of("tier_failures_total", "store", reason="away") == 1
    assert (of("cache_evicted_bytes_total", "device"), of("cache_evicted_bytes_total", "host")) == (10, 20)


def test_what_is_in_tiers_is_read_at_the_scrape() -> None:
    status = {Tier.HOST: TierStatus(1, 10, 100)}
    metrics = EngineMetrics(CollectorRegistry())
    metrics.registry.register(TierCollector(lambda: status))
    status[Tier.DISK] = TierStatus(2, 20, 200)
    found = scrape(metrics)
    for tier, values in (("host", (1, 10, 100)), ("disk", (2, 20, 200))):
        labels = frozenset({("tier", tier)})
        names = ("tier_entries", "tier_bytes", "tier_limit_bytes")
        assert tuple(found[f"temper_engine_{name}", labels] for name in names) == values


def test_an_engine_without_tiers_has_none(metrics: EngineMetrics) -> None:
    assert not [name for name, _ in scrape(metrics) if name == "temper_engine_tier_entries"]
