"""Outbox of events for webhooks in Redis: a stream that scripts add to in the same moment as what they tell of.

So an event is there if and only if what it tells of is, whatever dies then. Gateways with webhooks take entries out
(services/gateway/core/webhook_store.py); without any the stream stays short.
"""

from __future__ import annotations

from typing import Final

OUTBOX: Final = "temper:webhooks:outbox"
"""Stream of {type, data: JSON, url: of the job, or empty}; an entry's id has the time of the event."""
_LENGTH: Final = 10_000
NOTIFY: Final = f"""
local function notify(kind, data, url)
  redis.call('XADD', '{OUTBOX}', 'MAXLEN', '~', {_LENGTH}, '*', 'type', kind, 'data', cjson.encode(data),
    'url', url or '')
end
"""
"""Function for scripts: adds an event."""
