"""Tool use in Qwen's XML format: choose the function, fill its parameters, answer from its result."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from typing import Any

from models.tiny.recipe.item import Item, Message, user
from models.tiny.recipe.skills.words import city, invented, name, word

_DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
_MONEY = ["USD", "EUR", "GBP", "JPY", "CHF", "CAD"]
_WEATHER = ["sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "clear"]

# name: (description, {parameter: type}, wordings, wording of the final reply from the tool's result or None)
_TOOLS: dict[str, tuple[str, dict[str, str], tuple[str, ...]]] = {
    "get_weather": (
        "Get the current weather in a city.",
        {"city": "string"},
        ("What is the weather in {city}?", "How is the weather in {city} today?", "Weather in {city}, please."),
    ),
    "get_time": (
        "Get the local time in a city.",
        {"city": "string"},
        ("What time is it in {city}?", "Tell me the time in {city}."),
    ),
    "add_event": (
        "Add an event to the calendar.",
        {"title": "string", "day": "string"},
        ("Add {title} to my calendar on {day}.", "Put {title} on {day} in my calendar."),
    ),
    "convert_currency": (
        "Convert an amount of money.",
        {"amount": "integer", "source": "string", "target": "string"},
        ("Convert {amount} {source} to {target}.", "How much is {amount} {source} in {target}?"),
    ),
    "send_message": (
        "Send a text message to a person.",
        {"to": "string", "text": "string"},
        ("Send {to} the message: {text}", "Write to {to}: {text}"),
    ),
    "set_timer": (
        "Set a timer.",
        {"minutes": "integer"},
        ("Set a timer for {minutes} minutes.", "Wake me in {minutes} minutes."),
    ),
    "search": ("Search the web.", {"query": "string"}, ("Search for {query}.", "Look up {query} on the web.")),
    "play_music": ("Play music by an artist.", {"artist": "string"}, ("Play something by {artist}.", "Play {artist}.")),
}
_CALL = re.compile(r"<tool_call>\n<function=([^>\n]+)>\n(.*?)</function>\n</tool_call>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n(.*?)\n</parameter>\n", re.DOTALL)


def _value(rng: random.Random, key: str, kind: str) -> str | int:
    if kind == "integer":
        return rng.randint(1, 90 if key == "minutes" else 999)
    if key == "city":
        return city(rng)
    if key == "day":
        return rng.choice(_DAYS)
    if key in ("source", "target"):
        return rng.choice(_MONEY)
    if key in ("to", "artist"):
        return name(rng)
    return " ".join(word(rng) for _ in range(rng.choice((1, 1, 2, 3))))


def _schema(tool: str, description: str, parameters: Mapping[str, str]) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": tool,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in parameters.items()},
                "required": list(parameters),
            },
        },
    }


def _known(rng: random.Random) -> tuple[str, dict[str, Any], dict[str, Any], str]:
    """A tool of the list: its name, schema, arguments and the request."""
    tool = rng.choice(list(_TOOLS))
    description, parameters, wordings = _TOOLS[tool]
    arguments = {key: _value(rng, key, kind) for key, kind in parameters.items()}
    return tool, _schema(tool, description, parameters), arguments, rng.choice(wordings).format(**arguments)


def _unknown(rng: random.Random) -> tuple[str, dict[str, Any], dict[str, Any], str]:
    """A tool nobody has seen, named by the request, so that copying a schema is learned rather than a list of tools."""
    tool = f"{rng.choice(('get', 'find', 'set', 'run', 'make'))}_{invented(rng)}"
    parameters = {word(rng): rng.choice(("string", "integer")) for _ in range(rng.choice((1, 1, 2)))}
    arguments = {key: _value(rng, key, kind) for key, kind in parameters.items()}
    filled = " and ".join(f"{key} {value}" for key, value in arguments.items())
    request = rng.choice(("Call {tool} with {filled}.", "Use {tool} with {filled}.", "Please run {tool} for {filled}."))
    schema = _schema(tool, f"{rng.choice(('Handle', 'Manage', 'Change'))} the {word(rng)}.", parameters)
    return tool, schema, arguments, request.format(tool=tool, filled=filled)


def call_text(tool: str, arguments: Mapping[str, Any]) -> str:
    """A call as the chat template renders it and the model writes it."""
    body = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={tool}>\n{body}</function>\n</tool_call>"


def parse_calls(text: str) -> list[tuple[str, dict[str, str]]]:
    """Every complete call of a reply: function name and parameters as text."""
    return [(tool, dict(_PARAMETER.findall(body))) for tool, body in _CALL.findall(text)]


def same_calls(reply: str, answer: str) -> bool:
    """Whether both hold the same calls with the same arguments, in any order of the parameters."""
    calls = parse_calls(reply)
    return bool(calls) and calls == parse_calls(answer)


def _result(rng: random.Random, tool: str, arguments: Mapping[str, Any]) -> tuple[str, str] | None:
    """What the tool answers and what the assistant then says."""
    if tool == "get_weather":
        kind, degrees = rng.choice(_WEATHER), rng.randint(-9, 35)
        result = json.dumps({"weather": kind, "temperature": degrees})
        return result, f"The weather in {arguments['city']} is {kind} at {degrees} degrees."
    if tool == "get_time":
        clock = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
        return json.dumps({"time": clock}), f"It is {clock} in {arguments['city']}."
    if tool == "convert_currency":
        amount = rng.randint(1, 2000)
        spoken = f"{arguments['amount']} {arguments['source']} is {amount} {arguments['target']}."
        return json.dumps({"result": amount}), spoken
    if tool == "set_timer":
        return '{"ok": true}', f"The timer is set for {arguments['minutes']} minutes."
    if tool == "add_event":
        return '{"ok": true}', f"I have added {arguments['title']} on {arguments['day']}."
    return None


def make(rng: random.Random) -> Item:
    """A request with one to three tools on offer; a quarter of them continue after the tool's result."""
    tool, schema, arguments, request = _known(rng) if rng.random() < 0.7 else _unknown(rng)
    others = [other for other in _TOOLS if other != tool]
    schemas = [schema]
    schemas += [_schema(other, *_TOOLS[other][:2]) for other in rng.sample(others, rng.choice((0, 0, 1, 1, 2)))]
    rng.shuffle(schemas)
    turns: list[Message] = [user(request)]
    if rng.random() < 0.1:
        turns.insert(0, {"role": "system", "content": "You are a helpful assistant."})
    after = _result(rng, tool, arguments) if rng.random() < 0.3 else None
    if after is not None:
        call = {"type": "function", "function": {"name": tool, "arguments": arguments}}
        turns.append({"role": "assistant", "content": "", "tool_calls": [call]})
        turns.append({"role": "tool", "content": after[0]})
    return Item(
        skill="tools",
        key=f"{request} {after[0] if after else ''}",
        messages=tuple(turns),
        answer=after[1] if after else call_text(tool, arguments),
        tools=tuple(schemas),
        match=None if after else same_calls,
    )
