"""Traces: who asks what and when, drawn from the shapes of published ones. Nothing of anybody's text is in them.

A session begins at a time, asks its turns one after the other, and thinks in between; each turn's prompt is everything
said before and something new. Lengths are log-normal around the published means. Sources, and where a number was taken
from:

- Azure 2023: Patel et al., Splitwise (ISCA 2024). Computed from AzureLLMInferenceTrace_conv.csv and _code.csv of
  github.com/Azure/AzurePublicDataset (b469a11): conversations have prompts of 1,155 tokens in the mean, answers of 211,
  of at most 1,000, whose logarithm has a standard deviation of 0.86; between two requests of the coding service the
  coefficient of variation is 3.2 in the median minute (6.4 in a tenth of them), of conversations 1.0.
- Mooncake: Qin et al. (FAST 2025), table 2, and FAST25-release/README.md of github.com/kvcache-ai/Mooncake (3b5a594):
  tools and agents have prompts of 8,596 tokens in the mean, answers of 182, 59 % of prompt tokens can be cached.
  Computed from conversation_trace.jsonl: 126 s pass between two requests of one conversation in the median.
- Copilot 2026: Liu et al. (arXiv 2608.00101), GitHubCopilotCodingAgentDataset2026.md of the same repository as Azure:
  a coding agent calls the model 7.83 times a turn of its user; 86 % of prompt tokens were cached. Its prompts of 67,800
  tokens are more than the context that is simulated.
- Preble: Srivatsa et al. (ICLR 2025), table 1, ToolBench: prompts of 1,835 tokens, answers of 43, 85 % shared, 39
  requests share a prefix. Section 4.4 and exp_config_utils.py of github.com/WukLab/preble: popularity is Zipf's, 1.1.
- LMSYS: Zheng et al., LMSYS-Chat-1M (ICLR 2024), table 1: messages of 69.5 tokens.
- GRPO: DeepSeek-R1 (2025), 16 answers to a question, 32 questions a step; DeepSeekMath (2024): at most 1,024 tokens.
- BurstGPT: Wang et al. (KDD 2025) and example/README.md of github.com/HPMLL/BurstGPT: arrivals are modelled by a Gamma
  distribution.

The tables of Preble, LMSYS and the two of GRPO are cited as remembered: their text was not at hand. What no source says
is marked "ours".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import log
from typing import Literal

import numpy as np

from benchmarks.fleet.subject import Subject
from benchmarks.fleet.virtual.engine import VOCABULARY

_SPREAD = 0.86
"""Standard deviation of a length's logarithm: answers of Azure's conversations."""
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


_CHAT = Shape(
    preambles=4,  # ours, for each engine
    preamble_tokens=500,  # ours
    turns=3.1,  # with these preambles and messages, prompts of 1,155 tokens in the mean: Azure, conversations
    message_tokens=69.5,  # LMSYS
    output_tokens=211,  # Azure, conversations
    think_seconds=8.0,  # ours: a trace of half a minute has second turns, too (Mooncake: 126 s)
    most_output=1000,  # Azure, conversations
    per_engine=True,
)
SHAPES: Mapping[str, Shape] = {
    "chat": _CHAT,
    "agents": Shape(
        preambles=1,  # ours, for each engine
        preamble_tokens=3200,  # ours
        turns=7.83,  # Copilot: calls of the model in a turn of the user
        message_tokens=530,  # with these turns, prompts of 8,596 tokens in the mean: Mooncake, tools and agents
        output_tokens=182,  # Mooncake, tools and agents
        think_seconds=1.5,  # ours: waiting for a tool
        per_engine=True,
    ),
    "tools": Shape(
        preambles=1,  # ours, for each engine
        preamble_tokens=3600,  # with the rest, 59 % of prompt tokens in the cache: Mooncake, tools and agents
        turns=1.4,  # the same
        message_tokens=3524,  # 41 % of 8,596 tokens are new: Mooncake, tools and agents
        output_tokens=182,  # Mooncake, tools and agents
        think_seconds=1.5,  # ours
        per_engine=True,
    ),
    "shared-prompts": Shape(
        preambles=8,  # for each engine: 39 requests each in half a minute at half of what engines do: Preble
        preamble_tokens=1560,  # 85 % of 1,835: Preble, ToolBench
        turns=1.0,
        message_tokens=275,  # the rest of 1,835
        output_tokens=43,  # Preble, ToolBench
        think_seconds=0.0,
        zipf=1.1,  # Preble
        per_engine=True,
    ),
    "rl": Shape(
        preambles=1,
        preamble_tokens=100,  # ours
        turns=1.0,
        message_tokens=200,  # ours
        output_tokens=400,  # ours
        think_seconds=0.0,
        choices=16,  # DeepSeek-R1
        most_output=1024,  # DeepSeekMath
        arrivals="waves",  # a step's questions come at once: DeepSeek-R1
    ),
    "bursts": replace(_CHAT, arrivals="bursts"),
    # A tenth of the adapters gets nine tenths of the sessions. 4 adapters for each engine: ours.
    "adapters": replace(_CHAT, adapters=4),
}
_BURST_SHAPE = 0.1
"""Shape parameter of the Gamma distribution (BurstGPT): a coefficient of variation of 3.2 (Azure, code)."""
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
