"""Recorder: decides which requests are logged, and begins their recordings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from services.gateway.auth.caller import current_caller, owner
from services.learning.request_log.recording import RecordedChoice, Recording, chosen
from services.learning.request_log.writer import RequestLogWriter


class RequestRecorder:
    """Begins recordings of a share of the requests.

    Args:
        share: of the requests of API keys that have none of their own.
        writer: gets the recordings.
    """

    def __init__(self, share: float, writer: RequestLogWriter) -> None:
        self._share = share
        self.writer = writer

    def begin(
        self,
        request_id: str,
        kind: Literal["chat", "text"],
        body: Any,
        session: str | None,
        prompts: Sequence[Sequence[int]],
        choices: Sequence[RecordedChoice],
    ) -> Recording | None:
        """The recording of a request of the caller; None: it is not logged.

        Args:
            body: the request's model.
            prompts: token ids.
        """
        caller = current_caller()
        own = None if caller is None else caller.principal.log_share
        if not chosen(session or request_id, self._share if own is None else own):
            return None
        return Recording(request_id, owner(), kind, body, session, prompts, choices, self.writer.take)
