"""Errors, updates and metrics as the outside sees them."""

from __future__ import annotations

import errno
import re
import time

import grpc
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from services.common import errors
from services.common.pb import engine_pb2 as pb
from services.engine.observability.metrics import EngineMetrics, StateCollector
from services.engine.observability.status import AdapterSnapshot, Counts, LoadedAdapter, LoopStatus
from services.engine.requests.adapter import AdapterPin
from services.engine.requests.outputs import SampledToken, SequenceUpdate
from services.engine.requests.request import FinishReason
from services.engine.server.errors import status_code, to_message
from services.engine.server.protobuf import update_message


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (errors.ContextLengthExceeded("m"), pb.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED, grpc.StatusCode.INVALID_ARGUMENT),
        (errors.InvalidRequest("m"), pb.ERROR_CODE_INVALID_REQUEST, grpc.StatusCode.INVALID_ARGUMENT),
        (errors.ModelNotFound("m"), pb.ERROR_CODE_MODEL_NOT_FOUND, grpc.StatusCode.NOT_FOUND),
        (errors.AdapterRejected("m"), pb.ERROR_CODE_ADAPTER_REJECTED, grpc.StatusCode.FAILED_PRECONDITION),
        (errors.Overloaded("m"), pb.ERROR_CODE_OVERLOADED, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.Unavailable("m"), pb.ERROR_CODE_UNAVAILABLE, grpc.StatusCode.UNAVAILABLE),
        (errors.DeadlineExceeded("m"), pb.ERROR_CODE_DEADLINE_EXCEEDED, grpc.StatusCode.DEADLINE_EXCEEDED),
        (errors.TemperError("m"), pb.ERROR_CODE_INTERNAL, grpc.StatusCode.INTERNAL),
    ],
)
def test_every_error_has_one_code_and_one_status(error: errors.TemperError, code: int, status: grpc.StatusCode) -> None:
    assert (to_message(error).code, to_message(error).message, status_code(error)) == (code, "m", status)


@pytest.mark.parametrize(
    "error",
    [MemoryError(), OSError(errno.ENOMEM, "m"), OSError(errno.EMFILE, "m"), RuntimeError("can't start new thread")],
)
def test_an_engine_with_nothing_left_is_busy(error: Exception) -> None:
    message = to_message(error)
    assert (message.code, status_code(error)) == (pb.ERROR_CODE_OVERLOADED, grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert "memory, thread or file handle" in message.message
    assert message.exhausted
    assert not to_message(errors.Overloaded("64 requests wait already")).exhausted, "as it should be under load"


@pytest.mark.parametrize("error", [OSError(errno.EIO, "m"), RuntimeError("m"), KeyError("can't start new thread")])
def test_other_errors_of_these_kinds_are_bugs(error: Exception) -> None:
    assert to_message(error).code == pb.ERROR_CODE_INTERNAL


def test_a_bug_tells_clients_nothing_about_our_insides() -> None:
    message = to_message(KeyError("secret path"))
    assert (message.code, message.message) == (pb.ERROR_CODE_INTERNAL, errors.ENGINE_FAULT)


def test_an_update_on_the_wire() -> None:
    token = SampledToken(5, -0.5, -0.75, [5, 6], [-0.75, -1.0])
    message = update_message(SequenceUpdate("r", token, FinishReason.STOP, cached_tokens=3, adapter="a@1"))
    assert (message.request_id, list(message.token_ids), list(message.sampling_logprobs)) == ("r", [5], [-0.5])
    assert (list(message.logprobs), list(message.top_logprobs[0].token_ids)) == ([-0.75], [5, 6])
    assert (message.finish_reason, message.cached_tokens, message.adapter) == (pb.FINISH_REASON_STOP, 3, "a@1")
    assert not message.HasField("error")
    silent = update_message(SequenceUpdate("r", SampledToken(5, -0.5)))
    assert (list(silent.logprobs), list(silent.top_logprobs)) == ([], [])


def test_the_gauges_that_routers_read() -> None:
    counts = Counts(
        running=2, waiting=1, blocks_used=25, blocks_cached=5, blocks_total=100, slots_used=2, slots_cached=1,
        slots_total=9, preemptions=0, num_drafts=4, num_draft_tokens=10, num_accepted_tokens=7,
    )  # fmt: skip
    snapshot = AdapterSnapshot(
        "a@2",
        (LoadedAdapter(AdapterPin("a@1", "d", 1), 2), LoadedAdapter(AdapterPin("a@2", "e", 2), 0)),
        serving=("a@1", "a"),
        waiting=("b", "c@7"),
        drafter="sharp@3",
    )
    metrics = EngineMetrics(CollectorRegistry())
    metrics.registry.register(
        StateCollector("qwen", lambda: LoopStatus(counts, 3, True, True, 7, 0), lambda: snapshot, lambda: True, 8)
    )
    began = time.time()
    text = generate_latest(metrics.registry).decode()
    routed = re.search(r"vllm:lora_requests_info{(.+)} (\S+)", text)
    assert routed is not None
    assert routed[1] == 'max_lora="8",running_lora_adapters="a@1,a",waiting_lora_adapters="b,c@7"'
    assert began <= float(routed[2]) <= time.time(), "the value says which of several is the newest"
    for line in (
        'vllm:num_requests_running{engine="0",model_name="qwen"} 2.0',
        'vllm:num_requests_waiting{engine="0",model_name="qwen"} 4.0',
        'vllm:kv_cache_usage_perc{engine="0",model_name="qwen"} 0.25',
        'vllm:spec_decode_num_drafts_total{engine="0",model_name="qwen"} 4.0',
        'vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="qwen"} 10.0',
        'vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="qwen"} 7.0',
        'temper_engine_adapter_requests{adapter="a@1"} 2.0',
        'temper_engine_attached_adapter{adapter="a@2"} 1.0',
        'temper_engine_drafter{drafter="sharp@3"} 1.0',
        "temper_engine_training 1.0",
    ):
        assert line in text
