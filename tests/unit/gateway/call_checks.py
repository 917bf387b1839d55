"""Template, parser and grammars of calls, held against each other by calls that are drawn at random.

`python -m tests.unit.gateway.call_checks 2000` draws that many and tells what went wrong. With `--url`, the model of a
running gateway calls each drawn set of tools as well, at a temperature at which it writes anything.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

import httpx
import jsonschema_rs
from llguidance import LLMatcher

from services.common.text.output_parser import ChatParser, Delta
from services.common.text.tokenizer import TextCodec
from services.engine.constraints.grammars import GrammarLimits, compile_grammar
from services.engine.constraints.vocabulary import Vocabulary as Tokens
from services.engine.requests.sampling_params import Constraint, ConstraintKind
from services.gateway.text.detokenizer import MARKUP, TextAssembler, Vocabulary
from services.gateway.text.grammar.tool_calls import CallForm, TurnForm, tool_grammar
from tests.unit.gateway.hostile_calls import Drawn, canonical, draw, writable
from tests.unit.gateway.text.test_tool_corpus import joined, loads
from tests.unit.gateway.text.test_tool_grammar import TOKENIZER, check_walk, finite

CODEC = TextCodec.from_directory(Path("models/tiny"))
VOCABULARY = Vocabulary(CODEC)
TOKENS = Tokens(CODEC, TOKENIZER.vocab_size, threads=1)
ASKED = {"role": "user", "content": "Do it."}
LIMIT = 262144


def rendered(drawn: Drawn) -> list[int]:
    """The tokens with which the template goes on behind the prompt."""
    calls = [{"type": "function", "function": {"name": name, "arguments": values}} for name, values in drawn.calls]
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    prompt = CODEC.encode_chat([ASKED], tools=drawn.tools)
    whole = CODEC.encode_chat([ASKED, answer], tools=drawn.tools, add_generation_prompt=False)
    assert whole[: len(prompt)] == prompt
    assert whole[-2] in CODEC.eos_ids
    return whole[len(prompt) : -2]


def read(drawn: Drawn, pieces: list[str]) -> list[tuple[str, str]]:
    parser = ChatParser(thinking=False, tools=drawn.tools)
    deltas: list[Delta] = []
    for piece in pieces:
        deltas += parser.feed(piece)
    content, reasoning, calls = joined([*deltas, *parser.finish(complete=True)])
    assert not content
    assert not reasoning
    return [(name, canonical(loads(arguments))) for name, arguments in calls]


def by_token(tokens: list[int]) -> list[str]:
    assembler = TextAssembler(VOCABULARY)
    pieces = []
    for token in tokens:
        assembler.push(token)
        pieces.append(assembler.take().text)
    return [*pieces, assembler.take(final=True).text]


def check_read(drawn: Drawn, chance: random.Random) -> None:
    """Whole, token by token, character by character, and cut in two."""
    pieces = by_token(rendered(drawn))
    text = "".join(pieces)
    wanted = [(name, canonical(values)) for name, values in drawn.calls]
    assert read(drawn, [text]) == wanted, text
    assert read(drawn, pieces) == wanted, text
    assert read(drawn, list(text)) == wanted, text
    for _ in range(3):
        place = chance.randint(0, len(text))
        assert read(drawn, [text[:place], text[place:]]) == wanted, text


def check_allowed(drawn: Drawn) -> bool:
    """The template's tokens are of the grammar of forced calls, as the engine compiles it; False: they need not be."""
    if not writable(drawn):
        return False
    matcher = grammar_of(drawn)
    written = rendered(drawn)
    for tokens in (written, [token for piece in by_token(written) for token in CODEC.encode_plain(piece)]):
        one = matcher.deep_copy()
        for at, token in enumerate(tokens):
            assert one.consume_token(token), (VOCABULARY.text(tokens[:at]), VOCABULARY.text(tokens[at:]))
        assert one.is_accepting(), VOCABULARY.text(tokens)
    return True


def check_generated(drawn: Drawn, chance: random.Random) -> None:
    """Random tokens under the grammar are calls that their functions' schemas allow."""
    assert check_walk(grammar_of(drawn, repeat=False).deep_copy(), drawn.tools, chance)


def grammar_of(drawn: Drawn, *, repeat: bool = True) -> LLMatcher:
    functions = [
        CallForm(tool["function"]["name"], tool["function"]["parameters"], True, "tools[0].function.parameters")
        for tool in drawn.tools
    ]
    lark = tool_grammar(functions, TurnForm(forced=True, repeat=repeat), MARKUP, limit=LIMIT)
    constraint = Constraint(ConstraintKind.LARK, (lark,))
    return compile_grammar(TOKENS, constraint, GrammarLimits()).prototype


def check_model(drawn: Drawn, url: str, model: str, seed: int) -> bool:
    """A model that is let run wild calls these functions as their schemas say; False: it was cut off."""
    body = {
        "model": model,
        "messages": [ASKED],
        "tools": drawn.tools,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 1.5,
        "seed": seed,
        "max_tokens": 300,
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).json()
    choice = answer["choices"][0]
    if choice["finish_reason"] == "length":
        return False
    assert choice["finish_reason"] == "tool_calls", answer
    assert choice["message"]["content"] is None, answer
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in drawn.tools}
    (call,) = choice["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"], parse_float=finite)
    assert jsonschema_rs.is_valid(schemas[call["function"]["name"]], arguments), (drawn.tools, call)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, help="sets of tools with calls of them")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--url", help="of a gateway, whose model is to call the tools as well")
    parser.add_argument("--model", default="qwen3.5", help="its name there")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    calls = allowed = answered = wrong = 0
    for number in range(options.count):
        drawn = draw(chance)
        calls += len(drawn.calls)
        try:
            check_read(drawn, chance)
            allowed += check_allowed(drawn)
            check_generated(drawn, chance)
            answered += options.url is not None and check_model(drawn, options.url, options.model, number)
        except AssertionError as error:
            wrong += 1
            print(f"set {number} of seed {options.seed}: {error}", file=sys.stderr)
    print(f"{options.count} sets, {calls} calls read, {allowed} sets allowed, {answered} answered, {wrong} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
