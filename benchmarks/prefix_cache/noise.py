"""Noise of the prefix cache in log-probabilities, compared with a batch's: `python -m benchmarks.prefix_cache.noise
--model qwen3.5-4b --random`.

Conversations of random tokens: three turns, of some hundreds to a few thousand tokens, all at once, so that what is
cached was computed in pieces beside others, and the answers token by token. Then a message behind each, or, for every
second one, behind a place inside of it (a partial hit), and an answer drawn at temperature 1, one request at a time. Of
half of them the device has the history, of the other half only the host's memory. What everything is compared with is
the same prompt, computed whole, alone and without what was cached (under a salt of its own), forced to the same answer.
`mean`, `p99` and `max` are of the distances of the answer's log-probabilities, `equal` is the share of its places with
the same most likely token:

- cached: on the cache, by tier and kind of hit, and all together
- noise: without it. batch: the same prompts all at once beside one that decodes, so in pieces; decoded: the last tokens
  of the prompt, as many as were sampled in the conversation, forced token by token as those were
- other: the same last message behind another conversation, computed as the batch was: what a wrong hit would do

The cache is within the noise if neither its mean nor its p99 is above 1.5 times that of the noise, the larger one of
its two kinds. Exit status 1: it is not; or a kind of hit never came up; or `other` is within it as well, so that there
was nothing to see.

One JSON line for each dtype of the KV cache (`--kv`), each in a process of its own. Random checkpoints are gentle and
their head is not the embedding (see benchmarks.lib.random_checkpoint): otherwise rounding would grow from layer to
layer, or the last token decide everything. On a CPU, where recurrent states are float32 and there is no fp8, all there
is to see is that it runs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.lib.environment import environment, gpu
from benchmarks.lib.random_checkpoint import add_model, check_model, checkpoint
from benchmarks.lib.recorder import put_line
from benchmarks.prefix_cache.conversations import Conversation, Tokens, conversations

if TYPE_CHECKING:
    from benchmarks.lib.in_process import InProcessEngine
    from services.engine.requests.outputs import Finished, SampledToken, SequenceUpdate
    from services.engine.requests.sampling_params import SamplingParams

BOUND = 1.5
"""Times the noise."""
_ANSWER = 24
"""Tokens of the answer that is compared."""
_TOGETHER = 16
"""Conversations at once."""
_CPU_SHRINK = 8.0
_STUCK_SECONDS = 120.0
_LONG = 4096
"""Tokens that the request beside a batch may decode."""
TIERS = {"tiers": "host", "tier_load_share": 1000}
"""Whatever the host has is loaded, also where computing it would be the faster way: it is what is measured."""
KINDS = ("device, whole", "device, partial", "host, whole", "host, partial")


@dataclass(slots=True)
class Ask:
    """A request and what came of it."""

    prompt: Tokens
    sampling: SamplingParams
    salt: str = ""
    tokens: list[SampledToken] = field(default_factory=list)
    finished: Finished | None = None
    error: Exception | None = None

    @property
    def output(self) -> Tokens:
        return tuple(token.token_id for token in self.tokens)


class Asking:
    """Sends requests to an engine. Used by one thread, beside the loop's."""

    def __init__(self, engine: InProcessEngine) -> None:
        self._loop = engine.engine.loop
        self._ended: SimpleQueue[Ask] = SimpleQueue()
        self._flying: dict[str, Ask] = {}
        self._sent = 0

    def together(self, asks: Sequence[Ask]) -> None:
        """All at once; returns when all have ended.

        Raises:
            RuntimeError: one failed, or none has ended for long.
        """
        from benchmarks.lib.in_process import submit_together

        named = {self._name(): ask for ask in asks}
        self._flying |= named
        submit_together(self._loop, [_submission(name, ask) for name, ask in named.items()], self._sink)
        for _ in asks:
            try:
                done = self._ended.get(timeout=_STUCK_SECONDS)
            except Empty:
                raise RuntimeError(f"no request has ended for {_STUCK_SECONDS:.0f} s") from None
            if done.error is not None:
                raise RuntimeError(f"a request failed: {done.error}")

    def alone(self, asks: Sequence[Ask]) -> None:
        """One after the other."""
        for ask in asks:
            self.together([ask])

    @contextmanager
    def beside(self, ask: Ask) -> Iterator[None]:
        """While this one decodes."""
        decodes = threading.Event()

        def sink(_: list[SequenceUpdate]) -> None:
            decodes.set()

        name = self._name()
        self._loop.submit(_submission(name, ask), sink)
        if not decodes.wait(_STUCK_SECONDS):
            raise RuntimeError("the request beside the others does not begin")
        try:
            yield
        finally:
            self._loop.abort(name)

    def _name(self) -> str:
        self._sent += 1
        return f"noise-{self._sent}"

    def _sink(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            ask = self._flying[update.request_id]
            if update.token is not None:
                ask.tokens.append(update.token)
            if update.finish_reason is not None:
                ask.finished, ask.error = update.finished, update.error
                self._ended.put(ask)


def _submission(name: str, ask: Ask) -> Any:
    from services.engine.requests.adapter import AdapterChoice
    from services.engine.requests.submission import Submission

    return Submission(name, ask.prompt, ask.sampling, AdapterChoice(), cache_salt=ask.salt)


@dataclass(slots=True)
class Apart:
    """Distance of answers from those that they are compared with."""

    distances: list[float] = field(default_factory=list)
    equal: int = 0

    def add(self, tokens: Sequence[SampledToken], others: Sequence[SampledToken]) -> None:
        """Adds the same answer to the same prompt.

        Raises:
            ValueError: of another answer.
        """
        for one, other in zip(tokens, others, strict=True):
            if one.token_id != other.token_id:
                raise ValueError(f"token {one.token_id} is compared with token {other.token_id}")
            self.distances.append(abs(one.sampling_logprob - other.sampling_logprob))
            self.equal += one.top_ids[0] == other.top_ids[0]

    def __add__(self, other: Apart) -> Apart:
        return Apart(self.distances + other.distances, self.equal + other.equal)

    def figures(self) -> dict[str, float]:
        """Figures of at least one token."""
        values = np.array(self.distances)
        return {
            "mean": _short(values.mean()),
            "p99": _short(np.quantile(values, 0.99)),
            "max": _short(values.max()),
            "equal": round(self.equal / len(values), 4),
            "tokens": len(values),
        }


def _short(value: float | np.floating[Any]) -> float:
    return float(f"{float(value):.3e}")


class Measurement:
    """Results of the conversations, group by group.

    Args:
        answer: tokens of each answer that is compared.
    """

    def __init__(self, engine: InProcessEngine, *, answer: int) -> None:
        if engine.engine.tiers is None:
            raise ValueError("the engine has no tiers")
        self._engine = engine
        self._tiers = engine.engine.tiers
        self._asking = Asking(engine)
        self._answer = answer
        self._salts = 0
        self.cached: dict[str, Apart] = {kind: Apart() for kind in KINDS}
        self.noise: dict[str, Apart] = {"batch": Apart(), "decoded": Apart()}
        self.other = Apart()
        self.uncached = 0
        """Conversations of whose last prompt nothing was cached: not compared."""
        self.cached_tokens: Counter[str] = Counter()
        self.lengths: list[int] = []

    def group(self, talks: Sequence[Conversation]) -> None:
        """Talks, measures and forgets."""
        histories = self._talk(talks)
        prompts = [talk.prompt(history) for talk, history in zip(talks, histories, strict=True)]
        # On the cache, and first of all: what comes later takes its room.
        cached = [Ask(prompt, _drawn(self._answer, number)) for number, prompt in enumerate(prompts)]
        self._asking.alone([ask for ask, talk in zip(cached, talks, strict=True) if not talk.host])
        self._settle()
        self._clear()
        self._asking.alone([ask for ask, talk in zip(cached, talks, strict=True) if talk.host])
        answers = [_forced(ask.output) for ask in cached]
        # Without.
        alone = [self._fresh(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        self._asking.alone(alone)
        batch = [self._fresh(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        decoded = []
        for talk, prompt, ask in zip(talks, prompts, cached, strict=True):
            count = min(len(talk.turns) * talk.said, len(prompt) - 1)
            decoded.append(self._fresh(prompt[:-count], _forced((*prompt[-count:], *ask.output))))
        other = []
        for number, (talk, answer) in enumerate(zip(talks, answers, strict=True)):
            behind = number - 1
            elsewhere = prompts[behind][: -len(talks[behind].last)]
            other.append(self._fresh((*elsewhere, *talk.last), answer))
        with self._asking.beside(self._fresh(talks[0].last, _drawn(_LONG, 0))):
            self._asking.together(batch)
            self._asking.together(other)
        self._asking.together(decoded)
        self._clear()
        for number, talk in enumerate(talks):
            true = alone[number].tokens
            self._count(talk, cached[number], true)
            self.noise["batch"].add(batch[number].tokens, true)
            self.noise["decoded"].add(decoded[number].tokens[-len(true) :], true)
            self.other.add(other[number].tokens, true)
            self.lengths.append(len(prompts[number]))

    def figures(self) -> dict[str, Any]:
        """See the module."""
        cached = sum(self.cached.values(), Apart()).figures()
        noise = {kind: apart.figures() for kind, apart in self.noise.items()}
        other = self.other.figures()
        most = {name: max(each[name] for each in noise.values()) for name in ("mean", "p99")}
        wrong = [f"nothing of kind {kind!r}" for kind, apart in self.cached.items() if not apart.distances]
        wrong += [f"{name} of the cache above the noise" for name in most if cached[name] > BOUND * most[name]]
        if all(other[name] <= BOUND * most[name] for name in most):
            wrong.append("another history within the noise as well")
        return {
            "conversations": len(self.lengths),
            "prompt_tokens": [min(self.lengths), int(np.median(self.lengths)), max(self.lengths)],
            "cached_tokens": dict(self.cached_tokens),
            "uncached": self.uncached,
            "cached": {"all": cached}
            | {kind: apart.figures() for kind, apart in self.cached.items() if apart.distances},
            "noise": noise,
            "other": other,
            "ratios": {name: round(cached[name] / most[name], 3) if most[name] else None for name in most},
            "bound": BOUND,
            "wrong": wrong,
        }

    def _talk(self, talks: Sequence[Conversation]) -> list[Tokens]:
        """All conversations at once, turn by turn; everything said."""
        histories: list[Tokens] = [() for _ in talks]
        for turn in range(len(talks[0].turns)):
            asks = [
                Ask((*history, *talk.turns[turn]), _drawn(talk.said, turn))
                for history, talk in zip(histories, talks, strict=True)
            ]
            self._asking.together(asks)
            histories = [(*ask.prompt, *ask.output) for ask in asks]
        return histories

    def _count(self, talk: Conversation, ask: Ask, true: Sequence[SampledToken]) -> None:
        finished = ask.finished
        if finished is None or not finished.cached_tokens:
            self.uncached += 1
            return
        tier = "device" if finished.cached_from is None else finished.cached_from.value
        self.cached[f"{tier}, {'partial' if talk.cut < 1 else 'whole'}"].add(ask.tokens, true)
        self.cached_tokens[tier] += finished.cached_tokens

    def _fresh(self, prompt: Tokens, sampling: SamplingParams) -> Ask:
        """Request that shares nothing with any other."""
        self._salts += 1
        return Ask(prompt, sampling, f"fresh-{self._salts}")

    def _settle(self) -> None:
        """Waits until what is to be saved is saved."""
        before = None
        while (now := self._tiers.status()) != before:
            before = now
            if not self._tiers.wait_idle(_STUCK_SECONDS):
                raise RuntimeError("the tiers do not come to rest")
            # A save that has ended lets the loop ask for the next one.
            self._engine.engine.loop.call_with_scheduler(lambda _: None).result()

    def _clear(self) -> None:
        self._engine.engine.loop.call_with_scheduler(lambda scheduler: scheduler.clear_cache()).result()


def _drawn(count: int, seed: int) -> SamplingParams:
    from services.engine.requests.sampling_params import SamplingParams

    return SamplingParams(temperature=1.0, seed=seed, max_tokens=count, ignore_eos=True, top_logprobs=1)


def _forced(tokens: Tokens) -> SamplingParams:
    from services.engine.requests.sampling_params import SamplingParams

    return replace(SamplingParams.forcing(tokens, 1.0), top_logprobs=1)


def measure(engine: InProcessEngine, talks: Sequence[Conversation], *, answer: int) -> Measurement:
    """All conversations, some at a time, behind a few that warm up."""
    Measurement(engine, answer=answer).group([_reversed(talk) for talk in talks[:4]])
    measured = Measurement(engine, answer=answer)
    for begin in range(0, len(talks), _TOGETHER):
        measured.group(talks[begin : begin + _TOGETHER])
    return measured


def _reversed(talk: Conversation) -> Conversation:
    """Conversation that is as long and has nothing in common."""
    return replace(talk, turns=tuple(turn[::-1] for turn in talk.turns))


def run(options: argparse.Namespace) -> int:
    """One engine; the exit status."""
    from services.pod.preflight import use_kernel_cache

    began = time.perf_counter()
    directory = checkpoint(options.model, options.scratch, gentle=True)
    # Imported after Triton's cache is chosen.
    from benchmarks.lib.in_process import InProcessEngine, only_warnings, settings_for

    only_warnings()
    cuda = options.device == "cuda"
    given = dict(pair.split("=", 1) for pair in options.set)
    settings = settings_for(directory, options.device, **(_engine(cuda) | {"kv_cache_dtype": options.kv[0]} | given))
    use_kernel_cache(settings)
    engine = InProcessEngine(settings, prefix_cache=True)
    started = time.perf_counter()
    shrink = options.shrink or (1.0 if cuda else _CPU_SHRINK)
    limits = engine.engine.loop.config
    try:
        talks = conversations(options.conversations, engine.vocab_size, options.seed, shrink)
        measured = measure(engine, talks, answer=_ANSWER)
    finally:
        engine.stop()
    line = {
        "benchmark": "prefix_noise",
        "model": options.model,
        "command": "python -m benchmarks.prefix_cache.noise " + " ".join(sys.argv[1:]),
        "kv": settings.kv_cache_dtype,
        "states": settings.state_dtype,
        "dtype": str(engine.engine.model.dtype).removeprefix("torch."),
        "sizes": {"seed": options.seed, "shrink": shrink, "answer": _ANSWER},
        "engine": asdict(limits) | {"eos_token_ids": sorted(limits.eos_token_ids)},
        "start_s": round(started - began, 2),
        "measured_s": round(time.perf_counter() - started, 2),
        **measured.figures(),
        **environment(),
    }
    put_line(line, options.out)
    print(table(line), flush=True)
    return 1 if line["wrong"] else 0


def _engine(cuda: bool) -> dict[str, Any]:
    """Short pieces beside decodes; room for the states of a group."""
    if not cuda:
        return {"max_num_seqs": 32, "state_snapshots": 128, "mixed_prefill_tokens": 64, **TIERS}
    return {
        "max_num_seqs": 64,
        "state_snapshots": 192,
        "max_model_len": 16_384,
        "mixed_prefill_tokens": 512,
        "state_dtype": "bfloat16",
        **TIERS,
    }


def table(line: dict[str, Any]) -> str:
    """The figures for people."""
    rows = [(f"cached, {kind}", figures) for kind, figures in line["cached"].items()]
    rows += [(f"noise, {kind}", figures) for kind, figures in line["noise"].items()]
    rows.append(("other history", line["other"]))
    text = [f"KV {line['kv']}, states {line['states']}, model {line['dtype']}; {line['measured_s']} s"]
    for name, figures in rows:
        numbers = "  ".join(f"{key} {figures[key]:.2e}" for key in ("mean", "p99", "max"))
        text.append(f"  {name:24}  {numbers}  equal {figures['equal']:.2%} of {figures['tokens']:,}")
    text.append(f"  times the noise: {line['ratios']}; {'; '.join(line['wrong']) or 'within'}")
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--kv", help="dtypes of the KV cache, with commas; none: auto,fp8 on a GPU, auto on a CPU")
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--shrink", type=float, default=0.0, help="divides lengths; 0: by 1 on a GPU, 8 on a CPU")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="any other engine setting")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file to append the results to")
    options = parser.parse_args()
    check_model(parser, options)
    if options.conversations < 4:
        parser.error("--conversations must be at least 4: there are so many kinds")
    if options.device == "auto":
        options.device = "cpu" if gpu() is None else "cuda"
    options.kv = (options.kv or ("auto" if options.device == "cpu" else "auto,fp8")).split(",")
    if len(options.kv) == 1:
        sys.exit(run(options))
    # The first engine's memory would lack the second.
    command = [sys.executable, "-m", "benchmarks.prefix_cache.noise", *sys.argv[1:]]
    sys.exit(max(subprocess.run([*command, "--kv", kv], check=False).returncode != 0 for kv in options.kv))


if __name__ == "__main__":
    main()
