"""What the documents of a later release are in the lists of this one."""

from __future__ import annotations

from services.common.errors import NewerSchema
from services.gateway.auth.caller import sees
from services.gateway.protocol.fields.listing import UnreadableDocument


class Unreadable(list[UnreadableDocument]):
    """Documents that a list of the caller's passes over, in its order. Calls are a PassOver.

    Args:
        own: all that is passed over is the caller's. Otherwise it is told to whom the writer says that it belongs, and
            to who sees everybody's.
    """

    def __init__(self, *, own: bool = False) -> None:
        super().__init__()
        self._own = own

    def __call__(self, document: str, key_id: str | None, error: NewerSchema) -> None:
        """Tells of a document. See PassOver."""
        if self._own or sees(key_id):
            self.append(UnreadableDocument(id=document, message=error.message))
