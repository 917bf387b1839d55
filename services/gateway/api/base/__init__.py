"""Parts that the API's packages share: routes, answers, idempotency, OpenAPI."""
