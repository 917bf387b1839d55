"""Protobuf of Tinker's SDK: a forward_backward becomes a call of a training session, and its result their output."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from services.common.errors import InvalidRequest
from services.common.jobs.training_sessions.calls import Forward, ForwardBackward
from services.common.pb import tinker_pb2 as pb
from services.gateway.api.training.tinker.bodies import checked

MOST_COLUMNS = 64
"""Targets of one position."""
_TYPES = {pb.DTYPE_FLOAT32: "f", pb.DTYPE_INT64: "q", pb.DTYPE_INT32: "i"}
_SAMPLED = frozenset({"logprobs", "advantages"})
_INPUTS: Mapping[str, frozenset[str]] = {
    "cross_entropy": frozenset(),
    "importance_sampling": _SAMPLED,
    "ppo": _SAMPLED,
    "cispo": _SAMPLED,
    "dro": _SAMPLED,
}
"""Tensors that a loss needs besides target_tokens; weights are optional with all of them."""
_CONFIG: Mapping[str, Mapping[str, float]] = {
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": 0.1},
}
"""Settings of each loss with Tinker's defaults; thresholds are those of the ratio itself."""
_NOT_HERE: Mapping[str, str] = {
    "gspo": "use ppo, or forward_backward_custom",
    "stable_reinforce": "it needs what samplers of Tinker record; use importance_sampling or cispo",
    "custom": "losses do not run on this server; forward_backward_custom runs one in the client",
}


@dataclass(frozen=True, slots=True)
class Scoring:
    """A forward or forward_backward.

    ``widths``: targets of a position of each datum; 0: a vector has them, one a position. A datum of several targets is
    as many data of the call, whose losses add up to its own.
    """

    call: Forward | ForwardBackward
    widths: tuple[int, ...]


def parse(body: bytes) -> pb.ForwardBackwardRequest:
    """Raises InvalidRequest if it is no such message."""
    try:
        return pb.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise InvalidRequest("the body is no ForwardBackwardRequest of Tinker's protobuf") from error


def scoring_of(message: pb.ForwardBackwardRequest, most_tokens: int) -> Scoring:
    """The call that a message asks for.

    Args:
        most_tokens: of a call, each counted once for every target of its position.

    Raises:
        InvalidRequest: something is wrong with it.
    """
    loss = message.loss_fn
    if loss in _NOT_HERE:
        raise InvalidRequest(f"the loss {loss} is not supported: {_NOT_HERE[loss]}", param="loss_fn")
    if loss not in _INPUTS:
        raise InvalidRequest(f"the loss {loss[:80]!r} is none of {', '.join(_INPUTS)}", param="loss_fn")
    if not message.data:
        raise InvalidRequest("data is empty: send at least one datum", param="data")
    config = _config_of(message)
    data: list[dict[str, Any]] = []
    widths = []
    left = most_tokens
    for index, datum in enumerate(message.data):
        found, width = _data_of(datum, loss, f"data[{index}]", left)
        left -= sum(len(one["token_ids"]) for one in found)
        data += found
        widths.append(width)
    kind: type[Forward | ForwardBackward] = Forward if message.forward_only else ForwardBackward
    body = {"seq": message.seq_id, "loss": loss, "loss_config": config, "data": data}
    return Scoring(checked(kind, body), tuple(widths))


def output_of(result: Mapping[str, Any], widths: Sequence[int]) -> bytes:
    """ForwardBackwardOutput of a call's result."""
    columns = iter(result["logprobs"])
    output = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    output.metrics["loss:sum"] = math.nan if result["loss"] is None else result["loss"]
    output.metrics["tokens:sum"] = result["num_tokens"]
    for name, value in result["metrics"].items():
        output.metrics[f"{name}:mean"] = math.nan if value is None else value
    for width, group in itertools.groupby(widths):
        parts = [_interleaved([next(columns) for _ in range(width or 1)]) for _ in group]
        offsets = array("q", itertools.accumulate((4 * len(part) for part in parts), initial=0))
        record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(parts))
        record.fields["logprobs"].CopyFrom(
            pb.BatchedTensor(
                data=b"".join(part.tobytes() for part in parts),
                offsets=offsets.tobytes(),
                dtype=pb.DTYPE_FLOAT32,
                trailing_shape=[width] if width else [],
            )
        )
    return output.SerializeToString()


def _interleaved(columns: Sequence[Sequence[float | None]]) -> array[float]:
    """Columns row by row; NaN for what has no log-probability."""
    rows = zip(*columns, strict=True)
    return array("f", [math.nan if value is None else value for row in rows for value in row])


def _config_of(message: pb.ForwardBackwardRequest) -> dict[str, float]:
    given: dict[str, float] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise InvalidRequest(f"loss_fn_config.{name} must be a number", param=f"loss_fn_config.{name}")
        given[name] = value.number
    known = _CONFIG.get(message.loss_fn, {})
    for name in given.keys() - known.keys():
        raise InvalidRequest(
            f"the loss {message.loss_fn} has no setting {name[:80]!r} (it has: {', '.join(known) or 'none'})",
            param=f"loss_fn_config.{name[:80]}",
        )
    whole = {**known, **given}
    if "clip_low_threshold" in whole:
        _check_thresholds(message.loss_fn, whole["clip_low_threshold"], whole["clip_high_threshold"])
    if message.loss_fn == "ppo":
        return {"clip_low": 1.0 - whole["clip_low_threshold"], "clip_high": whole["clip_high_threshold"] - 1.0}
    if message.loss_fn == "cispo":
        return {"floor": whole["clip_low_threshold"], "cap": whole["clip_high_threshold"]}
    return whole


def _check_thresholds(loss: str, low: float, high: float) -> None:
    one = 1.0 if loss == "ppo" else high  # PPO clips on either side of 1
    if not (0 <= low <= one <= high < math.inf and high > 0):
        raise InvalidRequest(
            f"clip_low_threshold is {low:g} and clip_high_threshold {high:g}: they must be 0 <= low <= "
            f"{'1 <= ' if loss == 'ppo' else ''}high",
            param="loss_fn_config",
        )


def _data_of(datum: pb.Datum, loss: str, place: str, most_tokens: int) -> tuple[list[dict[str, Any]], int]:
    """Data of a session, one a column of targets, and how many columns there are (0: a vector)."""
    tokens: list[int] = []
    for chunk in datum.model_input:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise InvalidRequest(
                f"{place}.model_input has an image or sound, and this model trains on text only", param=place
            )
        tokens += _numbers("i", chunk.encoded_text.tokens, f"{place}.model_input")
    shape = list(datum.loss_fn_inputs["target_tokens"].shape) if "target_tokens" in datum.loss_fn_inputs else []
    if len(tokens) * (shape[1] if len(shape) == 2 else 1) > most_tokens:
        raise InvalidRequest(
            f"with {place} the call has more tokens than one may have (TEMPER_SESSION_CALL_TOKENS; a token counts once "
            "for every target of its position): send fewer, gradients accumulate over calls",
            param=place,
        )
    needed = _INPUTS[loss] | {"target_tokens"}
    for name in sorted(needed - datum.loss_fn_inputs.keys()):
        raise InvalidRequest(f"the loss {loss} needs {place}.loss_fn_inputs.{name}", param=f"{place}.loss_fn_inputs")
    for name in sorted(datum.loss_fn_inputs.keys() - needed - {"weights"}):
        raise InvalidRequest(
            f"the loss {loss} does not take {place}.loss_fn_inputs.{name[:80]}: leave it out",
            param=f"{place}.loss_fn_inputs",
        )
    columns = {
        name: _columns(tensor, len(tokens), f"{place}.loss_fn_inputs.{name}")
        for name, tensor in datum.loss_fn_inputs.items()
    }
    if datum.loss_fn_inputs["target_tokens"].dtype == pb.DTYPE_FLOAT32:
        raise InvalidRequest(f"{place}.loss_fn_inputs.target_tokens must be int64", param=f"{place}.loss_fn_inputs")
    targets, width = columns.pop("target_tokens")
    for name, (values, own) in columns.items():
        if own != width:
            raise InvalidRequest(
                f"{place}.loss_fn_inputs.{name} must have the shape of target_tokens: {len(values)} values a position, "
                f"not {len(targets)}",
                param=f"{place}.loss_fn_inputs.{name}",
            )
    if width and loss != "cross_entropy":
        raise InvalidRequest(
            f"the loss {loss} takes one target a position: send target_tokens of one dimension",
            param=f"{place}.loss_fn_inputs.target_tokens",
        )
    data = [
        {
            "token_ids": tokens,
            "targets": [int(token) for token in column],
            "score_all": True,
            **{name: list(map(float, values[number])) for name, (values, _) in columns.items()},
        }
        for number, column in enumerate(targets)
    ]
    return data, width


def _columns(tensor: pb.Tensor, rows: int, place: str) -> tuple[list[list[float]], int]:
    """Values of each target of a position, and how many targets there are: 0 for a vector."""
    kind = _TYPES.get(tensor.dtype)
    if kind is None:
        raise InvalidRequest(f"{place} must be float32 or int64", param=place)
    shape = tuple(tensor.shape)
    sparse = tensor.WhichOneof("encoding") == "sparse_csr"
    values = _numbers(kind, tensor.sparse_csr.values if sparse else tensor.dense, place)
    if not shape and not sparse:
        shape = (len(values),)
    if not 1 <= len(shape) <= 2 or shape[0] != rows or (sparse and len(shape) != 2):
        raise InvalidRequest(
            f"{place} has the shape {list(shape)} and the input {rows} tokens: one row each, of one number or several",
            param=place,
        )
    width = shape[1] if len(shape) == 2 else 0
    if len(shape) == 2 and not 1 <= width <= MOST_COLUMNS:
        raise InvalidRequest(f"{place} has {width} numbers a position, and may have 1 to {MOST_COLUMNS}", param=place)
    if sparse:
        values = _dense(tensor.sparse_csr, values, rows, width, place)
    if len(values) != rows * (width or 1):
        raise InvalidRequest(f"{place} has {len(values)} values, which its shape {list(shape)} is not", param=place)
    return [values[number :: width or 1] for number in range(width or 1)], width


def _dense(csr: pb.SparseCsr, values: Sequence[float], rows: int, width: int, place: str) -> list[float]:
    starts, places = _numbers("q", csr.crow_indices, place), _numbers("q", csr.col_indices, place)
    wrong = InvalidRequest(f"{place} is no sparse matrix of {rows} rows and {width} columns", param=place)
    if len(starts) != rows + 1 or len(places) != len(values) or starts[0] != 0 or starts[-1] != len(values):
        raise wrong
    dense: list[float] = [0] * (rows * width)
    for row, (begin, end) in enumerate(itertools.pairwise(starts)):
        for number in range(begin, end):
            if not 0 <= number < len(values) or not 0 <= places[number] < width:
                raise wrong
            dense[row * width + places[number]] = values[number]
    return dense


def _numbers(kind: str, data: bytes, place: str) -> list[Any]:
    numbers = array(kind)
    if len(data) % numbers.itemsize:
        raise InvalidRequest(f"{place} has {len(data)} bytes, which are no array of its type", param=place)
    numbers.frombytes(data)
    return numbers.tolist()
