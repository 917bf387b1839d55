"""The workloads of `benchmarks.prefix_cache.multiturn`: sessions whose prompts go on behind what was said before. No
torch here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session: its prompt is everything said so far and ``new``."""

    new: Tokens
    out: int
    """Tokens to generate, never fewer."""


@dataclass(frozen=True, slots=True)
class Session:
    """Requests that follow each other."""

    turns: tuple[Turn, ...]
    shared: int = 0
    """Tokens of its first prompt that an earlier session's has as well."""

    @property
    def length(self) -> int:
        """Tokens at the end."""
        return sum(len(turn.new) + turn.out for turn in self.turns)

    def reusable(self, turn: int) -> int:
        """Tokens of a turn's prompt that were computed before; the last one sampled never was."""
        if turn == 0:
            return self.shared
        return sum(len(each.new) + each.out for each in self.turns[:turn]) - 1

    def marks(self, turn: int) -> Tokens:
        """Ends of messages inside of a turn's prompt: each earlier one and each answer."""
        lengths = [length for each in self.turns[:turn] for length in (len(each.new), each.out)]
        return tuple(accumulate(lengths))


@dataclass(frozen=True, slots=True)
class Workload:
    """Sessions, and when their turns are sent."""

    name: str
    title: str
    sessions: tuple[Session, ...]
    order: tuple[int, ...]
    """Sessions in the order in which they are sent, each as often as it has turns."""
    concurrency: int
    """Requests in flight at most."""
    together: bool = False
    """Every turn waits for all sessions' turn before."""

    @property
    def tokens(self) -> int:
        """Tokens of all histories in the end."""
        return sum(session.length for session in self.sessions)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Scale of a workload: how much smaller it is than written in the tables."""

    vocab_size: int
    seed: int = 0
    sessions: float = 1.0
    tokens: float = 1.0

    @property
    def whole(self) -> bool:
        return self.sessions == 1.0 and self.tokens == 1.0

    def count(self, number: int, least: int = 1) -> int:
        """Number of sessions."""
        return max(least, round(number * self.sessions))

    def length(self, number: int) -> int:
        """Length of a prompt or an answer."""
        return max(2, round(number * self.tokens))


class _Tokens:
    """Random tokens; another stream for each workload, so that they share nothing by chance."""

    def __init__(self, sizes: Sizes, name: str) -> None:
        self._random = np.random.default_rng([sizes.seed, *name.encode()])
        self._sizes = sizes

    def take(self, length: int, spread: int = 0) -> Tokens:
        """About ``length`` of them, up to ``spread`` more or fewer, as the sizes say."""
        low, high = self._sizes.length(length - spread), self._sizes.length(length + spread)
        count = int(self._random.integers(low, high + 1))
        return tuple(self._random.integers(0, self._sizes.vocab_size, count).tolist())

    def shuffled(self, items: Sequence[int]) -> list[int]:
        return [int(item) for item in self._random.permutation(np.array(items, dtype=np.int64))]


def chats(sizes: Sizes) -> Workload:
    """Four turns of a chat, all sessions' first turns before the second ones, and single requests among them."""
    random = _Tokens(sizes, "a")
    warm, cold, out = sizes.count(64), sizes.count(64), sizes.length(64)
    sessions = [
        Session(tuple(Turn(random.take(*((64, 8) if turn else (1024, 32))), out) for turn in range(4)))
        for _ in range(warm)
    ]
    sessions += [Session((Turn(random.take(1024, 32), out),)) for _ in range(cold)]
    order: list[int] = []
    for turn in range(4):
        singles = range(warm + turn * cold // 4, warm + (turn + 1) * cold // 4)
        order += random.shuffled([*range(warm), *singles])
    return Workload("a", "W3: 4 turns of 1,024 + 64, single ones among them", tuple(sessions), tuple(order), 16)


def tools(sizes: Sizes) -> Workload:
    """Long prompts whose second turn is a tool's answer."""
    random = _Tokens(sizes, "b")
    count, out = sizes.count(128), sizes.length(256)
    sessions = [Session((Turn(random.take(8192, 64), out), Turn(random.take(256), out))) for _ in range(count)]
    order = [*random.shuffled(range(count)), *random.shuffled(range(count))]
    return Workload("b", "W4: 8,192, then 256 of a tool", tuple(sessions), tuple(order), 8)


def agents(sizes: Sizes) -> Workload:
    """Agents whose every turn brings much that is new; all of them at once."""
    random = _Tokens(sizes, "c")
    count, out = sizes.count(16), sizes.length(214)
    sessions = [
        Session(tuple(Turn(random.take(3900 if turn else 6000), out) for turn in range(8))) for _ in range(count)
    ]
    order = [number for _ in range(8) for number in range(count)]
    return Workload("c", "agents: 6,000, 7 times 3,900 more", tuple(sessions), tuple(order), count, together=True)


def shared_prompts(sizes: Sizes) -> Workload:
    """A few long prompts, each with many different ends, all at once."""
    random = _Tokens(sizes, "d")
    prompts = [random.take(2000) for _ in range(8)]
    count, out = sizes.count(256, least=16), sizes.length(64)
    sessions = [
        Session((Turn(prompts[number % 8] + random.take(100), out),), len(prompts[0]) if number >= 8 else 0)
        for number in range(count)
    ]
    return Workload("d", "8 prompts of 2,000, each with many ends of 100", tuple(sessions), tuple(range(count)), count)


def rollouts(sizes: Sizes) -> Workload:
    """Groups of equal prompts, all at once. Of an equal prompt all but the last token could be reused."""
    random = _Tokens(sizes, "e")
    groups, out = sizes.count(8), sizes.length(256)
    prompts = [random.take(512) for _ in range(groups)]
    sessions = [
        Session((Turn(prompt, out),), len(prompt) - 1 if copy else 0) for prompt in prompts for copy in range(16)
    ]
    count = len(sessions)
    return Workload("e", "GRPO: 8 prompts of 512, 16 times each", tuple(sessions), tuple(range(count)), count)


def one_at_a_time(sizes: Sizes, base: int, new: int) -> Workload:
    """A prompt, and at once the turn behind it; nothing else runs."""
    name = f"w{base}"
    random = _Tokens(sizes, name)
    count, out = sizes.count(20, least=2), sizes.length(16)
    sessions = [Session((Turn(random.take(base), out), Turn(random.take(new), out))) for _ in range(count)]
    order = [number for number in range(count) for _ in range(2)]
    return Workload(name, f"alone: {base:,}, then {new} more", tuple(sessions), tuple(order), 1)


def histories(sizes: Sizes, name: str, count: int, length: int) -> Workload:
    """Single requests of random tokens, one after the other, with an answer of 16."""
    random = _Tokens(sizes, name)
    sessions = [Session((Turn(random.take(length), sizes.length(16)),)) for _ in range(count)]
    return Workload(name, f"alone: {length:,}", tuple(sessions), tuple(range(count)), 1)


GENERATORS: dict[str, Callable[[Sizes], tuple[Workload, ...]]] = {
    "a": lambda sizes: (chats(sizes),),
    "b": lambda sizes: (tools(sizes),),
    "c": lambda sizes: (agents(sizes),),
    "d": lambda sizes: (shared_prompts(sizes),),
    "e": lambda sizes: (rollouts(sizes),),
    "w": lambda sizes: (one_at_a_time(sizes, 1024, 64), one_at_a_time(sizes, 8192, 256)),
}
"""Workloads by the letters of `--workload`."""


def fitting(workload: Workload, capacity: int) -> Workload:
    """Workload with only its first sessions, as many as fit into ``capacity`` with all their tokens."""
    count, tokens = 0, 0
    for session in workload.sessions:
        tokens += session.length
        if tokens > capacity:
            break
        count += 1
    kept = tuple(number for number in workload.order if number < count)
    return replace(workload, sessions=workload.sessions[:count], order=kept)
