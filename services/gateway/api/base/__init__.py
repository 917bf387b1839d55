"""What API packages share: routes, answers, idempotency, OpenAPI."""
