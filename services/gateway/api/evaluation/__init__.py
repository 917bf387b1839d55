"""/v1/eval and /v1/evaluations: suites, and their runs."""
