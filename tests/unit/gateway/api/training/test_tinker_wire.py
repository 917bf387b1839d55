"""Protobuf of Tinker's SDK: whatever is sent becomes a call or is refused, and matrices are their columns."""

from __future__ import annotations

from array import array
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import tinker
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output

from services.common.errors import InvalidRequest
from services.common.pb import tinker_pb2 as pb
from services.gateway.api.training.tinker.wire import output_of, parse, scoring_of

MOST = 1000
_NUMBERS = st.lists(st.integers(-3, 40), max_size=5)


def sent(data: list[types.Datum], loss: Any = "cross_entropy", **config: float) -> pb.ForwardBackwardRequest:
    """What the server reads of what the SDK sends."""
    body = types.ForwardBackwardInput(data=data, loss_fn=loss, loss_fn_config=config or None)
    request = tinker.types.ForwardBackwardRequest(model_id="m", seq_id=3, forward_backward_input=body)
    return parse(forward_backward_request_to_proto(request).SerializeToString())


def datum(count: int, **inputs: Any) -> types.Datum:
    asked: dict[str, Any] = {"target_tokens": list(range(1, count + 1)), **inputs}
    return types.Datum(model_input=types.ModelInput.from_ints(list(range(count))), loss_fn_inputs=asked)


def test_a_datum_is_read_as_it_was_written() -> None:
    chunks: list[Any] = [types.EncodedTextChunk(tokens=[5, 6]), types.EncodedTextChunk(tokens=[7])]
    inputs: dict[str, Any] = {
        "target_tokens": [6, 7, 8],
        "weights": [0.0, 0.5, -1.0],
        "logprobs": np.array([0.0, -1.5, -2.0]),
        "advantages": [0, 1, 2],
    }
    call = scoring_of(
        sent([types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs=inputs)], "ppo"), MOST
    )
    (read,) = call.call.data
    assert (read.token_ids, read.targets, read.score_all) == ([5, 6, 7], [6, 7, 8], True)
    assert (read.weights, read.logprobs, read.advantages) == ([0.0, 0.5, -1.0], [0.0, -1.5, -2.0], [0.0, 1.0, 2.0])
    config = call.call.loss_config
    assert (config.clip_low, config.clip_high) == (pytest.approx(0.2), pytest.approx(0.2))
    assert (call.call.seq, call.call.kind, call.widths) == (3, "forward_backward", (0,))


def test_a_matrix_of_targets_is_its_columns() -> None:
    targets = np.array([[1, 9], [2, 0], [3, 0]])
    dense = types.TensorData.from_numpy(targets)
    sparse = types.TensorData(
        data=[1, 9, 2, 3],
        dtype="int64",
        shape=[3, 2],
        sparse_crow_indices=[0, 2, 3, 4],
        sparse_col_indices=[0, 1, 0, 0],
    )
    weights = types.TensorData.from_numpy(np.array([[1.0, 2.0], [1.0, 0.0], [1.0, 0.0]], dtype=np.float32))
    found = [scoring_of(sent([datum(3, target_tokens=one, weights=weights)]), MOST) for one in (dense, sparse)]
    assert found[0] == found[1]
    first, second = found[0].call.data
    assert (first.targets, second.targets, second.weights) == ([1, 2, 3], [9, 0, 0], [2.0, 0.0, 0.0])
    result = {"loss": 1.5, "num_tokens": 8, "metrics": {}, "logprobs": [[-1.0], [-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]]}
    output = deserialize_forward_backward_output(output_of(result, (0, 2)))
    plain, matrix = (one["logprobs"] for one in output.loss_fn_outputs)
    assert (plain.tolist(), matrix.tolist()) == ([-1.0], [[-1.0, -4.0], [-2.0, -5.0], [-3.0, -6.0]])
    assert output.metrics["loss:sum"] == 1.5


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (sent([datum(3)], "stable_reinforce"), "stable_reinforce is not supported"),
        (sent([datum(3)], "ppo", clip_low_threshold=1.5), "must be 0 <= low <= 1 <= high"),
        (sent([datum(3)], "dro", beta=-1.0), "needs data"),
        (sent([datum(3, mask=types.TensorData(data=[1, 1, 1], dtype="int64"))]), "does not take data"),
        (sent([datum(3, target_tokens=types.TensorData(data=[1.0] * 3, dtype="float32"))]), "must be int64"),
        (sent([datum(600), datum(600)]), "with data[1] the call has more tokens"),
        (sent([datum(3, weights=[float("nan")] * 3)]), "finite"),
        (pb.ForwardBackwardRequest(loss_fn="cross_entropy", seq_id=1), "data is empty"),
    ],
)
def test_what_is_wrong_is_named(message: pb.ForwardBackwardRequest, reason: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        scoring_of(message, MOST)
    assert reason in refused.value.message


@st.composite
def tensors(draw: st.DrawFn) -> pb.Tensor:
    values = array(draw(st.sampled_from("qif")), draw(_NUMBERS)).tobytes() + draw(st.binary(max_size=1))
    tensor = pb.Tensor(dtype=draw(st.integers(0, 5)), shape=draw(st.lists(st.integers(-1, 70), max_size=3)))
    if draw(st.booleans()):
        tensor.dense = values
    elif draw(st.booleans()):
        rows, columns = array("q", draw(_NUMBERS)).tobytes(), array("q", draw(_NUMBERS)).tobytes()
        tensor.sparse_csr.CopyFrom(pb.SparseCsr(values=values, crow_indices=rows, col_indices=columns))
    return tensor


@given(
    st.lists(_NUMBERS, min_size=1, max_size=3),
    st.dictionaries(st.sampled_from(["target_tokens", "weights", "logprobs", "advantages"]), tensors()),
    st.sampled_from(["cross_entropy", "ppo", "dro", "", "gspo"]),
    st.dictionaries(st.sampled_from(["beta", "clip_low_threshold"]), st.floats(), max_size=1),
)
@settings(max_examples=150, deadline=None)
def test_nothing_that_is_sent_is_a_bug(
    rows: list[list[int]], inputs: dict[str, pb.Tensor], loss: str, config: dict[str, float]
) -> None:
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn=loss, loss_fn_config=config)
    for tokens in rows:
        one = message.data.add()
        one.model_input.add().encoded_text.tokens = array("i", tokens).tobytes()
        for name, tensor in inputs.items():
            one.loss_fn_inputs[name].CopyFrom(tensor)
    with suppress(InvalidRequest):
        found = scoring_of(message, MOST)
        assert len(found.call.data) == sum(width or 1 for width in found.widths)
