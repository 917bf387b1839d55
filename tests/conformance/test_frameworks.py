"""Agent frameworks and routers against the whole system, each through its own happy path.

They take seconds to import, which every process of a test run would spend: so fixtures and tests import them.

What the tiny model says is seldom sensible; what a constraint makes of it is checked by the framework itself, which
parses it into the caller's types.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING, Any

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.stack import Stack

if TYPE_CHECKING:
    from langchain_openai import ChatOpenAI

ENOUGH = 1024
"""Tokens that no answer here can need: what a constraint allows is finite, white space included (64 blanks between two
tokens of JSON), and a model may draw all of it. Not so where a type leaves more properties open than it names."""
QUESTION = "What is 12 plus 7?"
USER = [{"role": "user", "content": QUESTION}]


class Sign(Enum):
    """What is done with two numbers."""

    PLUS = "plus"
    MINUS = "minus"


class Sum(BaseModel):
    """A question of arithmetic."""

    model_config = ConfigDict(extra="forbid")

    left: int = Field(ge=0, le=99)
    sign: Sign
    right: int = Field(ge=0, le=99)


class Numbers(BaseModel):
    """The numbers of a question."""

    model_config = ConfigDict(extra="forbid")

    numbers: list[int] = Field(min_length=1, max_length=3)


def add(left: int, right: int) -> int:
    """Adds two numbers."""
    return left + right


ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "left": {"type": "integer", "minimum": 0, "maximum": 99},
                "right": {"type": "integer", "minimum": 0, "maximum": 99},
            },
            "required": ["left", "right"],
            "additionalProperties": False,
        },
    },
}


# -- LangChain


@pytest.fixture
def chain(stack: Stack) -> ChatOpenAI:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        model=stack.served_model_name,
        base_url=f"{stack.url}/v1",
        api_key="none",  # type: ignore[arg-type]
        max_retries=0,
        timeout=60,
        max_tokens=64,  # type: ignore[call-arg]
        temperature=0,
    )


def test_langchain_answers_and_streams(chain: ChatOpenAI) -> None:
    from langchain_core.messages import HumanMessage

    answer = chain.invoke([HumanMessage(QUESTION)])
    streamed = list(chain.stream([HumanMessage(QUESTION)], stream_usage=True))
    assert "".join(str(chunk.content) for chunk in streamed) == answer.content
    assert answer.usage_metadata is not None
    used = [chunk.usage_metadata for chunk in streamed if chunk.usage_metadata]
    assert used[-1]["output_tokens"] == answer.usage_metadata["output_tokens"] > 0


def test_langchain_calls_a_tool_and_takes_its_answer(chain: ChatOpenAI) -> None:
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
    from langchain_core.tools import tool

    adding = tool(add)
    bound = chain.bind_tools([adding], tool_choice="add", strict=True)
    call = bound.invoke([HumanMessage(QUESTION)])
    assert isinstance(call, AIMessage)
    assert [made["name"] for made in call.tool_calls] == ["add"] * len(call.tool_calls)
    arguments = call.tool_calls[0]["args"]
    assert all(isinstance(arguments[name], int) for name in ("left", "right"))
    merged = None
    for chunk in bound.stream([HumanMessage(QUESTION)]):
        merged = chunk if merged is None else merged + chunk
    assert merged is not None
    assert [c["args"] for c in merged.tool_calls] == [c["args"] for c in call.tool_calls]
    results = [ToolMessage(str(adding.invoke(made["args"])), tool_call_id=made["id"]) for made in call.tool_calls]
    after = chain.bind_tools([adding]).invoke([HumanMessage(QUESTION), call, *results])
    assert after.response_metadata["finish_reason"] in ("stop", "length", "tool_calls")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_parses_structured_output(chain: ChatOpenAI, method: Any) -> None:
    found = chain.with_structured_output(Sum, method=method).invoke(QUESTION)
    assert isinstance(found, Sum)


@pytest.mark.thorough
def test_langchain_embeds(stack: Stack) -> None:
    from langchain_openai import OpenAIEmbeddings

    embeddings = OpenAIEmbeddings(
        model=stack.served_model_name,
        base_url=f"{stack.url}/v1",
        api_key="none",  # type: ignore[arg-type]
        check_embedding_ctx_length=False,
        max_retries=0,
    )
    one, two, again = embeddings.embed_documents(["a cat", "a sum", "a cat"])
    assert one == pytest.approx(again, abs=1e-5)
    assert one != pytest.approx(two, abs=1e-3)
    assert sum(x * x for x in embeddings.embed_query("a cat")) == pytest.approx(1.0, abs=1e-3)


# -- LiteLLM


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Any:
    # It fetches a table of prices when it is imported, unless it is told to take its own.
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    return litellm


def _litellm(stack: Stack) -> dict[str, Any]:
    return {
        "model": f"openai/{stack.served_model_name}",
        "api_base": f"{stack.url}/v1",
        "api_key": "none",
        "timeout": 60,
        "num_retries": 0,
    }


def test_litellm_answers_and_streams(stack: Stack, litellm: Any) -> None:
    options = {**_litellm(stack), "messages": USER, "temperature": 0, "max_tokens": 24}
    answer = litellm.completion(**options)
    chunks = list(litellm.completion(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer.choices[0].message.content
    assert litellm.stream_chunk_builder(chunks).usage.completion_tokens == answer.usage.completion_tokens


@pytest.mark.thorough
def test_litellm_calls_a_tool(stack: Stack, litellm: Any) -> None:
    answer = litellm.completion(
        **_litellm(stack), messages=USER, tools=[ADD], tool_choice="required", max_tokens=ENOUGH
    )
    calls = answer.choices[0].message.tool_calls
    assert calls
    assert {call.function.name for call in calls} == {"add"}
    assert set(json.loads(calls[0].function.arguments)) == {"left", "right"}


@pytest.mark.thorough
def test_litellm_structured_output_and_embeddings(stack: Stack, litellm: Any) -> None:
    answer = litellm.completion(**_litellm(stack), messages=USER, response_format=Sum, max_tokens=ENOUGH)
    assert isinstance(Sum.model_validate_json(answer.choices[0].message.content), Sum)
    made = litellm.embedding(**_litellm(stack), input=["a", "b"])
    assert len(made.data) == 2
    assert len(made.data[0]["embedding"]) == len(made.data[1]["embedding"]) > 0


# -- instructor


@pytest.fixture
def plain(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_instructor_returns_the_callers_type(stack: Stack, plain: openai.OpenAI, mode: str) -> None:
    import instructor

    client = instructor.from_openai(plain, mode=instructor.Mode[mode])
    found = client.chat.completions.create(
        model=stack.served_model_name, messages=USER, response_model=Sum, max_tokens=ENOUGH, max_retries=0
    )
    assert isinstance(found, Sum)


@pytest.mark.thorough
def test_instructor_streams_partial_objects(stack: Stack, plain: openai.OpenAI) -> None:
    import instructor

    client = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
    parts = list(
        client.chat.completions.create_partial(
            model=stack.served_model_name, messages=USER, response_model=Numbers, max_tokens=ENOUGH
        )
    )
    assert parts[-1].numbers
    assert len(parts) > 1
