"""What alerts hold serving to. Objectives of an installation of one's own: copy the rules and change the numbers."""

from __future__ import annotations

ERRORS = 0.005
"""Share of requests that may fail with a status of 500 and above, in 30 days."""
TTFT_SECONDS = 2.5
"""Within which 95 % of completions have their first token; a bound of temper_gateway_time_to_first_token_seconds."""
ITL_SECONDS = 0.05
"""Below which 95 % of the times between tokens are; a bound of temper_gateway_inter_token_latency_seconds, and what
TEMPER_TPOT_SLO_MS asks of training by default."""
LATE = 0.05
"""Share of each that may be later."""
