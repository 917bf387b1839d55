"""Usage of an engine since its start: tokens computed, prompt tokens, and where the cached ones were."""

from __future__ import annotations

from collections import Counter

from services.engine.observability.events import EngineEvent, RequestDone, StepDone

DEVICE = "device"
"""Place of cached tokens that the device had; the others are the tiers."""


class UsageTotals:
    """Totals, written by a listener on the loop thread. Readers on other threads may miss the latest event."""

    def __init__(self) -> None:
        self.decode_tokens = 0
        self.prefill_tokens = 0
        self.prompt_tokens = 0
        """Tokens of the prompts that ran, of requests that have ended."""
        self.cache_hit_tokens: Counter[str] = Counter()
        """Those of them that were cached, by where they were."""

    def listen(self, event: EngineEvent) -> None:
        """Counts an event of the engine."""
        match event:
            case StepDone():
                self.decode_tokens += event.decodes
                self.prefill_tokens += event.prefill_tokens
            case RequestDone(finished=finished) if finished.scheduled_at is not None:
                self.prompt_tokens += len(finished.request.prompt_token_ids)
                tier = finished.cached_from
                self.cache_hit_tokens[DEVICE if tier is None else tier.value] += finished.cached_tokens
            case _:
                pass
