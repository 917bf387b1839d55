"""/v1/responses: OpenAI's Responses API."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from fastapi import Query, Request
from fastapi.responses import Response

from services.common.errors import Conflict, InvalidRequest, TemperError
from services.common.validation.json_rules import NULL
from services.gateway.api.base.openapi import answers_with
from services.gateway.api.base.routing import Inference, Routes, resource_of
from services.gateway.api.base.serving import SESSION_HEADER, answer, json_response, noted, session_named
from services.gateway.api.responses.documents import Turn, check_new, find_conversation, page_of
from services.gateway.api.responses.response_object import (
    CONTINUABLE,
    Data,
    Record,
    checked_id,
    given_items,
    new_response,
    parsed,
)
from services.gateway.api.responses.serving import Answering, Included, Responses, ResponseServices
from services.gateway.api.responses.store import Place, resolved
from services.gateway.api.responses.to_chat import chat_fields
from services.gateway.auth.caller import principal_of
from services.gateway.auth.route_permissions import INFERENCE, Permission
from services.gateway.core.admission import Reservation
from services.gateway.core.client_disconnect import while_connected
from services.gateway.inference.canaries import KnownAs
from services.gateway.inference.chat import chat_generation, prompt_length, truncated
from services.gateway.inference.context import InferenceContext
from services.gateway.inference.generation import Generation, reserve, traceparent_of
from services.gateway.protocol.chat_request import ChatRequest
from services.gateway.protocol.responses.events import ResponseStreamEvent
from services.gateway.protocol.responses.request import ResponseRequest
from services.gateway.protocol.responses.response import DeletedOut, InputItemsOut, InputTokensOut, ResponseOut
from services.learning.canaries.enrolment import Enrolment

routes = Routes("responses")


@routes.post(
    "/v1/responses",
    Permission(INFERENCE, generates=True),
    batches=ResponseRequest,
    responses=answers_with(ResponseOut, stream=ResponseStreamEvent),
    response_class=Response,
    openapi_extra=SESSION_HEADER,
)
async def create_response(request: Request, body: ResponseRequest) -> Response:
    """Answers a conversation of items. The response is kept for a while, so that another can continue it, unless
    store=false. With background=true the answer comes at once, and the model goes on without a connection. With
    stream=true the events are named by their type."""
    context, stores = resource_of(request, InferenceContext), resource_of(request, ResponseServices)
    owner = principal_of(request).id
    prior = await _prior(stores, owner, body)
    given = await resolved(stores.responses, owner, body.input)
    fields = chat_fields(body, parsed(prior), given)
    chat = fields.request()
    enrolment = _enrolled(request, context, chat)
    response = new_response(body, enrolment)
    items = given_items(given, response["id"])
    turn = None
    if body.conversation_id is not None:
        check_new(items, prior, field="input")
        turn = Turn(stores.documents, Place(owner, body.conversation_id), items)
    record = Record(response, [*prior, *items] if body.stored else [])
    known_as = KnownAs(record.id, enrolment)
    answering = Answering(stores, body, fields, Place(owner, record.id), record, turn)
    try:
        reservation = reserve(context, chat, prompts=1)
        if body.background:
            return await _begin(request, body, chat, context, stores, reservation, answering, record, owner, known_as)
        return await answer(
            request,
            chat,
            context,
            reservation,
            prepare=partial(_prepare, body=body, known_as=known_as),
            chunks=answering.chunks,
            complete=answering.complete,
            failed=answering.failed,
        )
    except TemperError as error:
        fields.rename(error)
        raise


async def _prepare(
    request: Request,
    chat: ChatRequest,
    context: InferenceContext,
    session: str | None,
    *,
    body: ResponseRequest,
    known_as: KnownAs,
) -> Generation:
    fitting = await _fitting(context, chat, body)
    traceparent = traceparent_of(request)
    return await chat_generation(context, fitting, session=session, traceparent=traceparent, known_as=known_as)


def _enrolled(request: Request, context: InferenceContext, chat: ChatRequest) -> Enrolment | None:
    """Part of a request in a canary: the response's id tells it, so it is drawn before everything else."""
    try:
        session = session_named(request, chat)
    except InvalidRequest:
        return None  # it is refused where fields have the names that were sent
    return context.enrol(chat, session)


async def _fitting(context: InferenceContext, chat: ChatRequest, body: ResponseRequest) -> ChatRequest:
    return await truncated(context, chat) if body.truncation == "auto" else chat


async def _prior(stores: ResponseServices, owner: str, body: ResponseRequest) -> list[Data]:
    """Items that a response continues: all that the one before was given and answered, or those of a conversation."""
    if body.conversation_id is not None:
        place = Place(owner, body.conversation_id)
        return (await find_conversation(stores.documents, place, param="conversation")).items
    previous = body.previous_response_id
    if previous is None:
        return []
    param = "previous_response_id"
    record = await stores.responses.load(Place(owner, checked_id(previous, param=param)), param=param)
    if record.status not in CONTINUABLE:
        raise Conflict(f"response {previous} is {record.status}: only one that has an answer continues", param=param)
    return record.whole


async def _begin(
    request: Request,
    body: ResponseRequest,
    chat: ChatRequest,
    context: InferenceContext,
    stores: ResponseServices,
    reservation: Reservation,
    answering: Answering,
    record: Record,
    owner: str,
    known_as: KnownAs,
) -> Response:
    """Starts a background response; it is stored before the client hears of it."""
    held = [reservation]
    try:
        held.append(stores.background.reserve())
        session = session_named(request, chat)
        generation = await while_connected(
            request, _prepare(request, chat, context, session, body=body, known_as=known_as)
        )
        await stores.responses.save(Place(owner, record.id), record)
        told = json_response(record.response, None)  # encoded before the model changes it
        stores.background.begin(answering.work(generation, tuple(held)))
        held.clear()
        return noted(told, chat, generation)
    finally:
        for taken in held:
            taken.release()


@routes.post("/v1/responses/input_tokens", Permission(INFERENCE))
async def count_input_tokens(
    request: Request, body: ResponseRequest, context: Inference, stores: Responses
) -> InputTokensOut:
    """How many tokens the prompt of such a request has. Nothing is generated or kept."""
    owner = principal_of(request).id
    prior = await _prior(stores, owner, body)
    given = await resolved(stores.responses, owner, body.input)
    fields = chat_fields(body, parsed(prior), given)
    chat = fields.request()
    reservation = reserve(context, chat, prompts=1)
    try:
        tokens = await while_connected(request, _length(context, chat, body))
    except TemperError as error:
        fields.rename(error)
        raise
    finally:
        reservation.release()
    return InputTokensOut(object="response.input_tokens", input_tokens=tokens)


async def _length(context: InferenceContext, chat: ChatRequest, body: ResponseRequest) -> int:
    return await prompt_length(context, await _fitting(context, chat, body))


@routes.get(
    "/v1/responses/{response_id}",
    Permission(INFERENCE),
    responses={200: {"model": ResponseOut}},
    response_class=Response,
)
async def get_response(
    request: Request,
    response_id: str,
    stores: Responses,
    stream: Annotated[
        bool | None, Query(description="Only false: poll instead.", json_schema_extra={"enum": [False, None]})
    ] = None,
    starting_after: Annotated[
        int | None, Query(description="Refused: stored responses are not streamed.", json_schema_extra=dict(NULL))
    ] = None,
    include: Annotated[
        list[str] | None,
        Query(
            alias="include[]",
            description="Refused: give it when you create the response.",
            json_schema_extra={"maxItems": 0},
        ),
    ] = None,
) -> Response:
    """A response that is kept; a background one as far as it is known: its output is there when it has ended."""
    for name, given in (("stream", stream), ("starting_after", starting_after is not None), ("include", include)):
        if given:
            instead = "give it when you create the response" if name == "include" else "poll this route until it ended"
            raise InvalidRequest(f"{name} is not supported for a stored response: {instead}", param=name)
    record = await stores.responses.load(_place(request, response_id))
    return json_response(record.response, record.response["adapter"])


@routes.delete("/v1/responses/{response_id}", Permission(INFERENCE))
async def delete_response(request: Request, response_id: str, stores: Responses) -> DeletedOut:
    """Forgets a response; one that runs in the background ends. Responses that continue it are kept, and have what it
    was given and answered."""
    place = _place(request, response_id)
    await stores.responses.delete(place)
    stores.background.cancel(place.id)
    return DeletedOut(id=place.id, object="response", deleted=True)


@routes.post(
    "/v1/responses/{response_id}/cancel",
    Permission(INFERENCE),
    responses={200: {"model": ResponseOut}},
    response_class=Response,
)
async def cancel_response(request: Request, response_id: str, stores: Responses) -> Response:
    """Ends a background response, whichever gateway runs it. One that has ended stays as it is."""
    place = _place(request, response_id)
    record = await stores.responses.cancel(place)
    stores.background.cancel(place.id)
    return json_response(record.response, record.response["adapter"])


@routes.get("/v1/responses/{response_id}/input_items", Permission(INFERENCE))
async def list_input_items(
    request: Request,
    response_id: str,
    stores: Responses,
    after: Annotated[str | None, Query(max_length=256, description="Continue behind the item of this id.")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    _include: Included = None,
) -> InputItemsOut:
    """What a response was given: the items of the responses that it continues, and its own input. Newest first, unless
    order says otherwise."""
    items = (await stores.responses.load(_place(request, response_id))).items
    page: list[Any]
    missing_item = f"response {response_id} has no input item"
    page, more = page_of(items, after=after, limit=limit, order=order, missing_item=missing_item)
    return InputItemsOut(
        object="list",
        data=page,
        first_id=page[0]["id"] if page else None,
        last_id=page[-1]["id"] if page else None,
        has_more=more,
    )


def _place(request: Request, response_id: str) -> Place:
    return Place(principal_of(request).id, checked_id(response_id))
