"""Random requests made from the gateway's own OpenAPI description, as it allows and as it forbids: the answers are what
it says, none is a 5xx, what it forbids is refused, and what it allows is accepted — except for what no JSON Schema can
say, which is listed here.

Operations are named by the contract (tests/fixtures/contracts/http.txt): the description and schemathesis take seconds,
which every process of a test run would spend while it collects tests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.internal.cache import LRUCache
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

from services.gateway.server.app import create_app
from services.gateway.settings import GatewaySettings
from tests.contracts import PLACE
from tests.unit.gateway.conftest import Running
from tests.unit.gateway.reading_engine import reads

if TYPE_CHECKING:
    import schemathesis

OPERATIONS = {
    operation: json.loads(described)
    for operation, described in re.findall(r"^([A-Z]+ /\S*) (.*)", (PLACE / "http.txt").read_text(), re.M)
    # An event stream of a job that nobody finishes has no end to wait for.
    if not operation.endswith("/events")
}

BEYOND_JSON_SCHEMA: Mapping[str, str] = {
    # What the served model and its engines are.
    r"the vocabulary (has|ends at)": "the size of the vocabulary",
    r"the model's context (is|of)": "the context",
    r"but this model's vectors have": "how wide its hidden states are",
    r"the limit for training (is|of)": "the engines' limit",
    r"lora\.rank is \d+ and the engines take at most": "the engines' limit",
    r"the engines have no second model loaded": "which models are loaded",
    r"which leaves no room for an answer": "how many tokens a text has",
    r"is no definition of a function|arguments are an object": "what a tool's definition holds",
    r"the chat template refuses these messages": "the model's template",
    r"the chat template does not show the end of the last message": "the model's template",
    r"a single token with nothing before it": "how many tokens a text has",
    # The gateway's settings.
    r"choices and a request may have": "a limit of the gateway",
    r"this gateway has no API keys": "whether it has some",
    r"lora_path .* is (a path|below none|not of the form)": "the sources of adapters",
    # Sums, products and comparisons of what several fields hold.
    r"completions each are over the limit": "a product",
    r"thinking\.budget_tokens is \d+ and max_tokens \d+": "a number against another",
    r"is \d+, but the completion may have at most": "a number against what others leave",
    r"is \d+, but (there are|a round has) \d+ prompts": "a number against a length",
    r"k is \d+, but there are \d+ samples": "a number against another",
    r"cut would do nothing: its fraction": "a product",
    r"with which a rollout may have": "a product",
    r"has \d+ entries and (token_ids|rewards) \d+: one": "lists of equal length",
    r"has \d+ entries and the trajectory \d+ actions": "lists of equal length",
    r"was sampled at temperature": "values that are equal",
    r"max_tokens and max_completion_tokens contradict each other": "values that are equal",
    r"nothing was observed behind the first action": "the end of a list",
    r"the last segment is an observation that no action answers": "the end of a list",
    r"must have one entry per token id": "lists of equal length",
    r"all rewards (discounted by \S+ a turn )?are equal": "values that differ",
    r"best_of must equal n": "values that are equal",
    r"chosen and rejected are the same": "values that differ",
    r"name different sessions": "a field against a header",
    # Unique names, and names that refer to each other.
    r"two tools have the": "uniqueness by one field",
    r"two requests have the custom_id": "uniqueness by one field",
    r"after_id and before_id": "one query parameter against another",
    r"say which feedback": "one query parameter among several",
    r"no row fulfils all conditions": "what is there",
    r"an answer cannot be better than itself": "values that differ",
    r"max_seconds must be over min_seconds": "one number against another",
    r"low must not be over high": "one number against another",
    r"validation and held_out together leave nothing": "a sum",
    r"the shares of mix leave nothing|leave nothing for new rows": "a sum",
    r"the body's name is": "a field against the path",
    r"no (settings|gate) of a learner's job": "fields of the job that another field names",
    r"is among the sources more than once": "uniqueness by one field",
    r"is scored twice": "uniqueness by one field",
    r"two calls of one turn have the id": "uniqueness by one field",
    r"tool_choice names": "a name in another list",
    r"no function_call before it has the call_id": "an earlier entry",
    r"has no tool_result in the turn after it": "a later entry",
    r"is no call of the turn before": "an earlier entry",
    # The order of lists, and their end.
    r"text of a turn comes after its tool_result blocks": "an order",
    r"there is no task": "a name in another object",
    r"there are no samples of task": "a name in another object",
    r"must end with the turn": "the end of a list",
    r"has no turn to learn": "the order of a list",
    r"renders assistant turn \d+ differently": "the model's template",
    r"does not end assistant turn": "the model's template",
    r"never closes it": "the model's template",
    r"has no tokens: an empty completion": "entries of two lists",
    r"completions has \d+ entries and truncated": "entries of two lists",
    r"they are the same setting": "two numbers that are equal",
    r"holds one example out|leaves one example to train": "a share of a list",
    r"that are left to train on all have label": "what a seed holds out",
    r"mask_truncated leaves out every": "values that differ",
    r"nothing to learn: the policy that the job starts from": "what is there",
    r"messages say nothing": "an entry of some role",
    r"continue_final_message cannot go on": "the end of a list",
    r"an answer whose beginning is given": "the end of a list",
    # What stands inside of strings and files, or is a schema itself.
    r"must be a JSON object[:,] ": "JSON in a text",
    r"is not JSON: ": "JSON in a text",
    r"the (host|port|path) of a URL|IPv4 or IPv6 address|IPv6 URL": "what stands in a URL",
    r"prompt (has|must have) \{": "placeholders in a text",
    r"every completion contains it": "an answer without words",
    r"beside the properties of a function cannot be enforced": "which schemas can be enforced",
    r"adapter_config\.json (is not valid JSON|must be a JSON object)": "what a file holds",
    r"this is not an exported session": "what a file holds",
}
"""What a refusal of an allowed request says, and what of it cannot be described. That nothing has a name is a 404, and
that a key was used before a 409, which the check takes for what they are."""


@pytest.fixture(scope="module")
def described() -> Mapping[str, schemathesis.schemas.APIOperation]:
    """Operations of the gateway's description, by their names."""
    import schemathesis

    schema = schemathesis.openapi.from_dict(create_app(GatewaySettings()).openapi())
    return {operation.ok().label: operation.ok() for operation in schema.get_all_operations()}


@pytest.fixture(autouse=True)
def equal_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """hypothesis draws constants of whatever modules of ours are imported at the moment: other ones in each worker."""
    monkeypatch.setattr(providers, "_get_local_constants", lambda: Constants())
    monkeypatch.setattr(providers, "CONSTANTS_CACHE", LRUCache(1024))


def beyond_json_schema(answer: schemathesis.Response) -> bool:
    """It refuses what the description allows for a reason that no description could give."""
    message = str(answer.json()["error"]["message"])
    return any(re.search(pattern, message) for pattern in BEYOND_JSON_SCHEMA)


def tried() -> Iterator[object]:
    """Operations, each with what it allows, and with what it forbids if it forbids anything: a name in the path is any
    text unless the description says more. One request of each; thoroughly, three more of what it allows."""
    for name, described in OPERATIONS.items():
        yield name, "positive", 1
        yield pytest.param(name, "positive", 4, marks=pytest.mark.thorough)
        schemas = [parameter["schema"] for parameter in described.get("parameters", ())]
        if "requestBody" in described or any(set(schema) - {"title"} != {"type"} for schema in schemas):
            yield name, "negative", 1


@pytest.mark.parametrize(("operation", "mode", "examples"), list(tried()))
def test_answers_are_as_described(
    running: Running,
    described: Mapping[str, schemathesis.schemas.APIOperation],
    operation: str,
    mode: str,
    examples: int,
) -> None:
    from schemathesis import GenerationMode
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    running.engine.behaviour = reads()

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=described[operation].as_strategy(generation_mode=GenerationMode(mode)))
    def exercise(case: schemathesis.Case) -> None:
        response = case.call(base_url=running.url, timeout=10)
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            anthropic = " /v1/messages" in operation
            # vLLM's errors have the fields of `error` outermost, too.
            outermost = {"object", *response.json()["error"]} if "object" in response.json() else set()
            assert set(response.json()) == ({"type", "error"} if anthropic else {"error"}) | outermost
            assert not outermost or "lora_adapter" in operation
        refused = 400 <= response.status_code < 500 and beyond_json_schema(response)
        case.validate_response(response, excluded_checks=[positive_data_acceptance] if refused else [])

    exercise()


def test_every_route_is_described(described: Mapping[str, schemathesis.schemas.APIOperation]) -> None:
    assert len(OPERATIONS) >= 20
    assert {operation for operation in described if not operation.endswith("/events")} == set(OPERATIONS)
