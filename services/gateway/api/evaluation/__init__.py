"""/v1/eval: suites of evaluations."""
