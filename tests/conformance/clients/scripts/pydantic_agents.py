"""pydantic-ai by all three APIs: a tool loop to its end, and a second turn. Prints a JSON object."""

import json
import sys
from pathlib import Path

from pydantic_ai import Agent, Tool
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

url, name, file = sys.argv[1:]
openai = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
models = {
    "chat": OpenAIChatModel(name, provider=openai),
    "responses": OpenAIResponsesModel(name, provider=openai),
    "anthropic": AnthropicModel(name, provider=AnthropicProvider(base_url=url, api_key="none")),
}


def set_it(minutes: int) -> str:
    """Set a timer."""
    with Path(file).open("a") as kept:
        kept.write(f"{minutes}\n")
    return '{"ok": true}'


SCHEMA = {"type": "object", "properties": {"minutes": {"type": "integer"}}, "required": ["minutes"]}
set_timer = Tool.from_schema(set_it, "set_timer", "Set a timer.", SCHEMA)
found = {}
for way, model in models.items():
    agent = Agent(model, model_settings={"temperature": 0}, tools=[set_timer])
    first = agent.run_sync("Set a timer for 89 minutes.")
    second = Agent(model).run_sync("What is 12 plus 7?", message_history=first.all_messages())
    found[way] = {"text": first.output, "second": second.output}
print(json.dumps(found))
