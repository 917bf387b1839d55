"""Random requests made from the gateway's own OpenAPI description, as it allows and as it forbids: the answers are what
it says, and none is a 5xx."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.specs.openapi.checks import positive_data_acceptance

from services.gateway.app import create_app
from services.gateway.settings import GatewaySettings
from tests.unit.gateway.conftest import Running
from tests.unit.gateway.reading_engine import reads

DESCRIPTION = create_app(GatewaySettings()).openapi()
OPERATIONS = [
    operation.ok()
    for operation in schemathesis.openapi.from_dict(DESCRIPTION).get_all_operations()
    # An event stream of a job that nobody finishes has no end to wait for.
    if not operation.ok().path.endswith("/events")
]


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
@pytest.mark.parametrize("operation", OPERATIONS, ids=[operation.label for operation in OPERATIONS])
def test_answers_are_as_described(
    running: Running, operation: schemathesis.schemas.APIOperation, mode: schemathesis.GenerationMode
) -> None:
    running.engine.behaviour = reads()

    @settings(
        max_examples=10 if mode is schemathesis.GenerationMode.POSITIVE else 4,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def exercise(case: schemathesis.Case) -> None:
        response = case.call(base_url=running.url, timeout=10)
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            anthropic = operation.path.startswith("/v1/messages")
            assert set(response.json()) == ({"type", "error"} if anthropic else {"error"})
        # What is allowed may still be refused: rules between fields, names that do not exist, the model's context.
        case.validate_response(response, excluded_checks=[positive_data_acceptance])

    try:
        exercise()
    except Unsatisfiable:
        assert mode is schemathesis.GenerationMode.NEGATIVE, "there is always something that is allowed"


def test_every_route_is_described() -> None:
    assert len(OPERATIONS) >= 20
