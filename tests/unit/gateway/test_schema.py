"""Random requests made from the gateway's own OpenAPI description: none may be answered with a 5xx."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from services.gateway.app import create_app
from services.gateway.settings import GatewaySettings
from tests.unit.gateway.conftest import Running

DESCRIPTION = create_app(GatewaySettings()).openapi()
OPERATIONS = [
    operation.ok()
    for operation in schemathesis.openapi.from_dict(DESCRIPTION).get_all_operations()
    # An event stream of a job that nobody finishes has no end to wait for.
    if not operation.ok().path.endswith("/events")
]


@pytest.mark.parametrize("operation", OPERATIONS, ids=[operation.label for operation in OPERATIONS])
def test_no_server_error(running: Running, operation: schemathesis.schemas.APIOperation) -> None:
    @settings(
        max_examples=10,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def exercise(case: schemathesis.Case) -> None:
        response = case.call(base_url=running.url, timeout=10)
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            anthropic = operation.path.startswith("/v1/messages")
            assert set(response.json()) == ({"type", "error"} if anthropic else {"error"})

    exercise()


def test_every_route_is_described() -> None:
    assert len(OPERATIONS) >= 20
