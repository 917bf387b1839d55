"""Traces: who asks what and when, drawn from the shapes of published ones. Nothing of anybody's text is in them.

A session begins at a time, asks its turns one after the other, and thinks in between; each turn's prompt is everything
said before and something new. Lengths are log-normal around the published means. Sources:

- Azure: Patel et al., Splitwise (ISCA 2024), conversations of Azure's trace of 2023: prompts of 1,155 tokens in the
  mean, answers of 211.
- LMSYS: Zheng et al., LMSYS-Chat-1M (ICLR 2024), table 1: messages of 69.5 tokens, answers of 214.5.
- Mooncake: Qin et al. (FAST 2025), the trace of tools and agents: prompts of 8,596 tokens in the mean, answers of 182,
  59 % of prompt tokens are in the cache.
- Preble: Srivatsa et al. (ICLR 2025), table 1, ToolBench: prompts of 1,835 tokens, answers of 43, 85 % shared.
- GRPO: DeepSeek-R1 (2025), 16 answers to a question, 32 questions a step; DeepSeekMath (2024): at most 1,024 tokens.
- BurstGPT: Wang et al. (2024): arrivals follow a Gamma distribution; how bursty, it says, varies by hour.

What no source says is marked "ours".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import log
from typing import Literal

import numpy as np

from benchmarks.fleet.engine import VOCABULARY
from benchmarks.fleet.subject import Subject

_SPREAD = 0.8
"""Standard deviation of a length's logarithm; ours."""
_FIRST_TOKEN = 256
"""Token ids below are small integers, which Python shares; drawn tokens lie above."""
Arrivals = Literal["poisson", "bursts", "waves"]
Random = np.random.Generator


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session."""

    message: tuple[int, ...]
    """New tokens of its prompt."""
    outputs: tuple[int, ...]
    """Tokens of each of its answers; the first is what the next turn goes on from."""
    answer: int
    """Token that its answers consist of."""
    think: float
    """Seconds from the answer before to this request."""


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation, an agent's run, or a single request."""

    number: int
    start: float
    preamble: tuple[int, ...]
    """What its prompts begin with: shared with other sessions."""
    turns: tuple[Turn, ...]
    adapter: str = ""
    """Name of the adapter that answers; empty: the base."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a trace: means of its numbers."""

    preambles: int
    """Different ones; their popularity follows Zipf's law."""
    preamble_tokens: float
    turns: float
    """Mean number of turns, geometric."""
    message_tokens: float
    output_tokens: float
    think_seconds: float
    zipf: float = 1.0
    choices: int = 1
    """Answers to each request."""
    most_output: int = 4096
    arrivals: Arrivals = "poisson"
    adapters: int = 0
    """A tenth of them gets nine tenths of the sessions."""
    per_engine: bool = False
    """``preambles`` and ``adapters`` are for each engine: a fleet grows with its tenants."""


SHAPES: Mapping[str, Shape] = {
    # Messages and answers: LMSYS. Turns: 3.5, and system prompts of 500 tokens, 4 different ones an engine: ours; with
    # them prompts come near Azure's mean.
    "chat": Shape(4, 500, 3.5, 69.5, 214.5, 8.0, per_engine=True),
    # Mooncake: a preamble of tools and ten steps whose tool results make the mean prompt and the answers. Waiting for a
    # tool: ours.
    "agents": Shape(1, 3200, 10.0, 900.0, 182.0, 1.5, per_engine=True),
    # Preble's ToolBench: 85 % of 1,835 tokens are a tool's description. 16 tools an engine: ours.
    "shared-prompts": Shape(16, 1560, 1.0, 275.0, 43.0, 0.0, zipf=1.0, per_engine=True),
    # GRPO: groups of 16 that begin at once. Questions of 200 tokens and answers of 400: ours.
    "rl": Shape(1, 100, 1.0, 200.0, 400.0, 0.0, choices=16, most_output=1024, arrivals="waves"),
    # As chat, by BurstGPT's Gamma arrivals.
    "bursts": Shape(4, 500, 3.5, 69.5, 214.5, 8.0, arrivals="bursts", per_engine=True),
    # As chat. A tenth of the adapters gets nine tenths of the sessions. 4 adapters an engine: ours.
    "adapters": Shape(4, 500, 3.5, 69.5, 214.5, 8.0, adapters=4, per_engine=True),
}
_BURST_SHAPE = 0.25
"""Shape parameter of the Gamma distribution: the coefficient of variation is 2; ours."""
_WAVE_SECONDS = 15.0
"""Between two steps of a GRPO job; ours."""
_DECODING = 32
"""Sequences beside which a token is decoded when a trace's work is estimated."""


@dataclass(slots=True)
class _Tokens:
    """Draws texts that no two others begin like."""

    random: Random
    vocabulary: int

    def text(self, length: int) -> tuple[int, ...]:
        return tuple(self.random.integers(_FIRST_TOKEN, self.vocabulary, length).tolist())

    def token(self) -> int:
        return int(self.random.integers(_FIRST_TOKEN, self.vocabulary))


def draw(
    shape: Shape, subject: Subject, engines: int, seconds: float, load: float, seed: int, vocabulary: int = VOCABULARY
) -> list[Session]:
    """Sessions of a trace, by their start.

    Args:
        engines: number of engines that the trace is for.
        load: share of the engines' time that it takes if everything is cached that was computed before.
        seed: equal ones give equal traces.
    """
    random = np.random.default_rng(seed)
    tokens = _Tokens(random, vocabulary)
    times = engines if shape.per_engine else 1
    preambles = [
        tokens.text(int(max(16, random.normal(shape.preamble_tokens, shape.preamble_tokens / 4))))
        for _ in range(shape.preambles * times)
    ]
    popularity = _zipf(len(preambles), shape.zipf)
    work = _session_seconds(shape, subject)
    adapters = _adapters(shape.adapters * times, random)
    found = []
    for number, start in enumerate(_starts(shape, load * engines / work, seconds, random)):
        preamble = preambles[int(random.choice(len(preambles), p=popularity))]
        turns = tuple(_turns(shape, tokens, subject, len(preamble)))
        found.append(Session(number, start, preamble, turns, adapters()))
    return found


def adapter_names(shape: Shape, engines: int) -> list[str]:
    """Names of all adapters of a trace."""
    return [f"adapter-{at}" for at in range(shape.adapters * (engines if shape.per_engine else 1))]


def _adapters(count: int, random: Random) -> Callable[[], str]:
    hot = max(1, count // 10)

    def chosen() -> str:
        if not count:
            return ""
        if random.random() < 0.9 or count == hot:
            return f"adapter-{random.integers(hot)}"
        return f"adapter-{random.integers(hot, count)}"

    return chosen


def _zipf(count: int, exponent: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    weights: np.ndarray[tuple[int], np.dtype[np.float64]] = np.arange(1, count + 1, dtype=np.float64) ** -exponent
    weights /= weights.sum()
    return weights


def _length(mean: float, random: Random, least: int = 1, most: int = 1 << 30) -> int:
    return int(min(most, max(least, random.lognormal(log(mean) - _SPREAD**2 / 2, _SPREAD))))


def _turns(shape: Shape, tokens: _Tokens, subject: Subject, preamble: int) -> Iterator[Turn]:
    random = tokens.random
    length = preamble
    for turn in range(int(random.geometric(1 / shape.turns))):
        message = tokens.text(_length(shape.message_tokens, random, 4))
        outputs = tuple(_length(shape.output_tokens, random, 2, shape.most_output) for _ in range(shape.choices))
        length += len(message) + outputs[0]
        if length > subject.config.max_model_len // 2:
            return
        yield Turn(message, outputs, tokens.token(), float(random.exponential(shape.think_seconds)) if turn else 0.0)


def _session_seconds(shape: Shape, subject: Subject) -> float:
    """Seconds of an engine that a session takes in the mean: what is new in its prompts, and its answers."""
    prompt = shape.preamble_tokens / 4 + shape.turns * shape.message_tokens
    context = shape.preamble_tokens + shape.turns * (shape.message_tokens + shape.output_tokens) / 2
    decoding = shape.turns * shape.choices * shape.output_tokens * subject.cost.decode_share(_DECODING, context)
    return prompt * subject.cost.token_seconds + decoding


def _starts(shape: Shape, rate: float, seconds: float, random: Random) -> Iterator[float]:
    """Starts of sessions, so many a second in the mean."""
    if shape.arrivals == "waves":
        for wave in np.arange(0.0, seconds, _WAVE_SECONDS):
            yield from [float(wave)] * int(random.poisson(rate * _WAVE_SECONDS))
        return
    k = _BURST_SHAPE if shape.arrivals == "bursts" else 1.0
    now = 0.0
    while (now := now + float(random.gamma(k, 1 / (k * rate)))) < seconds:
        yield now
