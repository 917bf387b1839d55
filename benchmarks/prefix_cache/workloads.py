"""Tree-shaped traffic for checks of the prefix cache: requests that go on behind each other's answers, branch inside
each other's prompts or are equal, on engines with so little memory that what is cached has to go again. No torch here.

One generator for the tests (which let hypothesis choose, and shrink) and for `benchmarks.prefix_cache.exact`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from services.engine.requests.adapter import AdapterPin
from services.engine.requests.request import Request
from services.engine.requests.sampling_params import SamplingParams
from services.engine.scheduler.config import SchedulerConfig

VOCAB = 96
LONGEST_PROMPT = 90
MOST_OUTPUT = 6
ADAPTERS = (AdapterPin(), AdapterPin("a@1", "digest-a", 1), AdapterPin("b@1", "digest-b", 2))
_EDGES = (1, 2, 7, 15, 16, 17, 31, 32, 33, 47, 48, 49)
"""Lengths around the ends of blocks."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a tree."""

    behind: int | None
    """The earlier request with whose prompt and answer its prompt begins; None: with nobody's."""
    keep: int
    """Number of tokens that are kept of those."""
    own: tuple[int, ...]
    """The rest of the prompt."""
    sampling: SamplingParams
    """Never ends early, so that lengths are known before anything runs."""
    pin: AdapterPin
    salt: str
    priority: int

    def prompt(self, history: Sequence[int]) -> tuple[int, ...]:
        """The prompt, given prompt and answer of the request that it is behind."""
        return (*history[: self.keep], *self.own)

    def request(self, number: int, prompt: tuple[int, ...]) -> Request:
        return Request(
            f"r{number}", prompt, self.sampling, self.pin, cache_salt=self.salt, priority=self.priority, arrival=number
        )


@dataclass(frozen=True, slots=True)
class Workload:
    """A tree of requests and the engine that they come to."""

    asks: tuple[Ask, ...]
    lengths: tuple[int, ...]
    """Lengths of the prompts."""
    config: SchedulerConfig
    arrivals: int
    """Requests that come before each step, at most; one comes when what it begins with is known."""
    forgets: tuple[int, ...]
    """Each time that two more requests have ended: how many of the tiers forget all beside the device, fastest first.
    Where there are no tiers, nobody is told to."""

    def branches(self, number: int) -> bool:
        """True if a request leaves the history that it begins with before its end."""
        ask = self.asks[number]
        if ask.behind is None:
            return False
        return ask.keep < self.lengths[ask.behind] + self.asks[ask.behind].sampling.max_tokens


def make_workload(draw: Random) -> Workload:
    """Another one for each state of ``draw``, which is asked only for what makes the structure."""
    asks: list[Ask] = []
    lengths: list[int] = []
    for number in range(draw.randint(2, 10)):
        # Of few kinds, so that requests also share what nobody planned.
        tokens = Random(draw.randint(0, 5))
        behind = None if number == 0 or draw.randint(0, 9) == 0 else draw.randint(0, number - 1)
        keep = 0 if behind is None else _cut(draw, lengths[behind], asks[behind].sampling.max_tokens)
        keep = min(keep, LONGEST_PROMPT)
        least = 0 if keep else 1
        size = draw.choice((0, 0, 1, 2, draw.choice(_EDGES))) if keep else _length(draw)
        size = max(least, min(size, LONGEST_PROMPT - keep))
        parent = None if behind is None else asks[behind]
        stays = parent is not None and draw.randint(0, 7) > 0
        asks.append(
            Ask(
                behind,
                keep,
                tuple(tokens.randrange(VOCAB) for _ in range(size)),
                _sampling(draw),
                parent.pin if parent is not None and stays else draw.choice((ADAPTERS[0], *ADAPTERS)),
                parent.salt if parent is not None and stays else draw.choice(("", "", "salt")),
                draw.choice((0, 0, 0, 0, -1, 1)),
            )
        )
        lengths.append(keep + size)
    longest = max(length + ask.sampling.max_tokens for length, ask in zip(lengths, asks, strict=True))
    engine, arrivals = _engine(draw, longest), draw.choice((1, 1, 2, 3, 10))
    forgets = tuple(draw.choice((0, 1, 2)) for _ in asks[1::2])
    return Workload(tuple(asks), tuple(lengths), engine, arrivals, forgets)


def _cut(draw: Random, prompt: int, answer: int) -> int:
    """Position at which to leave a prompt and its answer: at the end, so that the next turn follows; at the end of the
    prompt, which makes an equal one; around the ends of blocks; or anywhere."""
    history = prompt + answer
    kind = draw.randint(0, 5)
    if kind <= 1:
        return history
    if kind == 2:
        return prompt
    if kind == 3:
        return min(history, draw.choice(_EDGES))
    return draw.randint(1, history)


def _length(draw: Random) -> int:
    return draw.choice(_EDGES) if draw.randint(0, 1) else draw.randint(1, LONGEST_PROMPT)


def _sampling(draw: Random) -> SamplingParams:
    """Greedy, or drawn with a seed, which makes the same tokens of the same history."""
    seed = draw.choice((None, None, None, 5))
    return SamplingParams(
        temperature=0.0 if seed is None else 1.0,
        seed=seed,
        max_tokens=draw.randint(1, MOST_OUTPUT),
        ignore_eos=True,
        top_logprobs=1,
    )


def _engine(draw: Random, longest: int) -> SchedulerConfig:
    """Blocks for the longest request and a few more, one to six slots for snapshots."""
    block_size = draw.choice((16, 16, 8, 4, 1))
    seqs = draw.randint(1, 5)
    alignment = draw.choice((1, 1, 1, 4))
    least = seqs + alignment
    return SchedulerConfig(
        max_num_seqs=seqs,
        token_budget=least + draw.choice((0, 5, 16, 40, 96)),
        block_size=block_size,
        num_blocks=1 + -(-longest // block_size) + draw.choice((0, 1, 3, 8, 30)) * max(1, 8 // block_size),
        num_slots=1 + seqs + draw.randint(1, 6),
        max_model_len=LONGEST_PROMPT + 2 * MOST_OUTPUT,
        mixed_prefill_tokens=draw.choice((None, None, alignment + 8)),
        prefill_alignment=alignment,
    )
