"""Items that a request names instead of sending them: they are kept with the responses that they belong to."""

from __future__ import annotations

from collections.abc import Sequence

from services.common.errors import NotFound
from services.gateway.api.responses.store.record import Record, cut_call, parsed, response_of
from services.gateway.api.responses.store.store import Place, ResponseStore
from services.gateway.api.responses.to_chat.places import dotted
from services.gateway.protocol.responses.items import InputItem, Item, ItemReference


async def resolved(
    store: ResponseStore, owner: str, given: str | Sequence[InputItem], *, field: str = "input"
) -> str | list[Item | None]:
    """The input of a request, every reference replaced by what it names; None in the place of a call that was cut off,
    which can be neither run nor read.

    Args:
        store: where responses are kept.
        owner: who asks, and finds his own responses only.
        given: the input.
        field: of the request that has it.

    Raises:
        NotFound: an item is not kept.
        Unavailable: nobody can say.
    """
    if isinstance(given, str):
        return given
    records: dict[str, Record] = {}
    items: list[Item | None] = []
    for index, item in enumerate(given):
        if not isinstance(item, ItemReference):
            items.append(item)
            continue
        param = dotted((field, index, "id"))
        response = response_of(item.id)
        try:
            if response is not None and response not in records:
                records[response] = await store.load(Place(owner, response), param=param)
        except NotFound as error:
            raise _missing(item.id, param) from error
        found = None if response is None else records[response].item(item.id)
        if found is None:
            raise _missing(item.id, param)
        items.append(None if cut_call(found) else parsed([found])[0])
    return items


def _missing(item_id: str, param: str) -> NotFound:
    return NotFound(
        f"{param}: no such item: {item_id[:80]!r}; items are kept with their response, for a while only, and with "
        "store=true only: send the item itself",
        param=param,
    )
