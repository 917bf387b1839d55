"""The OpenAI Agents SDK by both APIs: a tool loop to its end, streamed too, and a session. Prints a JSON object."""

import asyncio
import json
import sys
from pathlib import Path

from agents import (
    Agent,
    FunctionTool,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

url, name, file = sys.argv[1:]
set_tracing_disabled(True)


def keep(minutes: int) -> None:
    with Path(file).open("a") as kept:
        kept.write(f"{minutes}\n")


async def set_it(_: object, arguments: str) -> str:
    keep(**json.loads(arguments))
    return '{"ok": true}'


SCHEMA = {"type": "object", "properties": {"minutes": {"type": "integer"}}, "required": ["minutes"]}
set_timer = FunctionTool("set_timer", "Set a timer.", SCHEMA, set_it, strict_json_schema=False)


async def main() -> None:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    models = {"responses": OpenAIResponsesModel(name, client), "chat": OpenAIChatCompletionsModel(name, client)}
    found = {}
    for way, model in models.items():
        agent = Agent("timer", model=model, tools=[set_timer], model_settings=ModelSettings(temperature=0))
        session = SQLiteSession(way)
        first = await Runner.run(agent, "Set a timer for 89 minutes.", max_turns=4, session=session)
        second = await Runner.run(agent.clone(tools=[]), "What is 12 plus 7?", session=session)
        streamed = Runner.run_streamed(agent, "Set a timer for 89 minutes.", max_turns=4)
        async for _ in streamed.stream_events():
            pass
        found[way] = {"text": first.final_output, "streamed": streamed.final_output, "second": second.final_output}
    print(json.dumps(found))


asyncio.run(main())
