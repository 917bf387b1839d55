"""Which policy a request means: `model` and `adapter` to an AdapterRef."""

from __future__ import annotations

from services.common.adapters.names import BASE, parse_adapter_ref
from services.common.errors import InvalidRequest, ModelNotFound
from services.common.pb import engine_pb2


def _named(text: str) -> engine_pb2.AdapterRef:
    name, version = parse_adapter_ref(text)
    return engine_pb2.AdapterRef(named=engine_pb2.NamedAdapter(name=name, version=version or 0))


def adapter_ref(model: str, adapter: str | None, *, served_model_name: str) -> engine_pb2.AdapterRef:
    """The policy that answers. Whether an adapter exists is for the engine to say.

    Raises:
        InvalidRequest: ``adapter`` is malformed.
        ModelNotFound: ``model`` cannot be a model of this server.
    """
    if model != served_model_name and (adapter is None or model not in (adapter, adapter.partition("@")[0])):
        try:
            by_model = _named(model)
        except InvalidRequest as error:
            raise ModelNotFound(
                f"model {model[:80]!r} does not exist: send {served_model_name!r} or the name of an adapter",
                param="model",
            ) from error
        if adapter is not None:
            raise ModelNotFound(
                f"with `adapter` set, `model` must be {served_model_name!r} or that adapter, not {model[:80]!r}",
                param="model",
            )
        return by_model
    if adapter is None:
        return engine_pb2.AdapterRef(attached=True)
    if adapter == BASE:
        return engine_pb2.AdapterRef(base=True)
    return _named(adapter)
