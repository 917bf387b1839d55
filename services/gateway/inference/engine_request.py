"""Fields that all engine requests have: adapter, cache salt, session, and the limits of prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from services.common.adapters.composition import Composition, Member, parse_composition
from services.common.adapters.names import BASE
from services.common.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from services.common.pb import engine_pb2
from services.gateway.auth.caller import owner
from services.gateway.protocol.chat_request import ChatRequest
from services.gateway.protocol.fields.adapters import PolicyFields
from services.gateway.protocol.fields.sampling import SamplingFields
from services.gateway.settings import CacheScope, GatewaySettings


def version_ref(text: str) -> engine_pb2.AdapterRef:
    """A named policy: "name@n", "name" for its current version, or a composition. Raises InvalidRequest."""
    return composition_ref(parse_composition(text))


def composition_ref(composition: Composition) -> engine_pb2.AdapterRef:
    """The policy of adapters that answer as one."""
    if (single := composition.single) is not None:
        return engine_pb2.AdapterRef(named=_named(single))
    members = [engine_pb2.ScaledAdapter(adapter=_named(member), scale=member.scale) for member in composition.members]
    return engine_pb2.AdapterRef(composition=engine_pb2.Composition(members=members))


def _named(member: Member) -> engine_pb2.NamedAdapter:
    return engine_pb2.NamedAdapter(name=member.name, version=member.version or 0)


def policy_ref(body: PolicyFields, *, served_model_name: str) -> engine_pb2.AdapterRef:
    """The policy that answers a request. Whether its adapters exist is for the engine to say.

    Raises:
        InvalidRequest: `adapter` or `adapters` is malformed.
        ModelNotFound: `model` cannot be a model of this server.
    """
    composition = body.composition
    if composition is None:
        return adapter_ref(body.model, body.adapter, served_model_name=served_model_name)
    asked = composition_ref(composition)
    if body.model != served_model_name and adapter_ref(body.model, None, served_model_name=served_model_name) != asked:
        raise ModelNotFound(
            f"with `adapters` set, `model` must be {served_model_name!r} or {str(composition)!r}, not "
            f"{body.model[:80]!r}",
            param="model",
        )
    return asked


def field_of_policy(body: PolicyFields) -> str:
    """The field that names the policy."""
    return next((field for field in ("adapters", "adapter") if getattr(body, field) is not None), "model")


def adapter_ref(model: str, adapter: str | None, *, served_model_name: str) -> engine_pb2.AdapterRef:
    """The policy that answers. Whether an adapter exists is for the engine to say.

    Raises:
        InvalidRequest: ``adapter`` is malformed.
        ModelNotFound: ``model`` cannot be a model of this server.
    """
    names = () if adapter is None else (adapter, adapter if "+" in adapter else adapter.partition("@")[0])
    if model != served_model_name and model not in names:
        try:
            by_model = version_ref(model)
        except InvalidRequest as error:
            composed = f" ({error.message})" if "+" in model or "*" in model else ""
            raise ModelNotFound(
                f"model {model[:80]!r} does not exist{composed}: send {served_model_name!r} or the name of an adapter",
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
    return version_ref(adapter)


_LONGEST_NAME = 256
"""Characters of a session's name, as engines have it."""
_DIGEST_BYTES = 20


def cache_salt(scope: CacheScope, given: str | None) -> str:
    """The salt of the caller's requests, under which engines share cached state.

    No two kinds begin alike, so whatever a client sends is never another kind's, nor the salt of an engine's own work.

    Args:
        scope: "shared": requests of all keys share what has the same ``given``. "key" and "auto": only those of one key
            do; without keys all callers are one.
        given: by the client.
    """
    if scope == "shared" or (scope == "auto" and not owner()):
        return "" if given is None else f"client:{given}"
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"temper salt")
    for part in (owner(), "" if given is None else f"client:{given}"):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return f"key:{digest.hexdigest()}"


def session_of(name: str) -> engine_pb2.SessionRef:
    """The caller's session of this name. One longer than engines take goes by its hash."""
    if len(name) > _LONGEST_NAME:
        name = "sha256-" + hashlib.sha256(name.encode()).hexdigest()
    return engine_pb2.SessionRef(owner=owner(), name=name)


def check_messages(body: SamplingFields, settings: GatewaySettings) -> None:
    """Checks the number of messages, before anything is rendered.

    Raises:
        InvalidRequest: a chat has too many messages.
    """
    if isinstance(body, ChatRequest) and len(body.messages) > settings.max_messages:
        raise InvalidRequest(
            f"the chat has {len(body.messages)} messages and the limit is {settings.max_messages}: leave old ones out",
            param="messages",
        )


def check_prompts(lengths: Sequence[int], settings: GatewaySettings) -> None:
    """Checks the length of prompts, before anything is sent to an engine.

    Raises:
        ContextLengthExceeded: a prompt has too many tokens.
    """
    if settings.max_prompt_tokens and max(lengths, default=0) > settings.max_prompt_tokens:
        raise ContextLengthExceeded(
            f"the prompt has {max(lengths)} tokens and the limit of this gateway is {settings.max_prompt_tokens}: "
            "shorten it"
        )
