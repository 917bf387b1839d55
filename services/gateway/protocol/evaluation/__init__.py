"""Bodies of /v1/eval and /v1/evaluations."""
