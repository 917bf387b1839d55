"""A GRPO step on episodes of several turns, end to end: `python -m benchmarks.training.environments.agents --out FILE`.

8 groups of 8 episodes of 6 turns: a prompt of 512 tokens, 128 sampled tokens a turn, and 200 tokens between two of them
from an environment in this process, which says what it has to at once, or after --answer-seconds. Qwen3.5-4B's shape
with random weights, rank 16 on all linear layers, AdamW; a step is a round. `--device cpu --shape tiny` does the same
on the tiny model, in small.

One JSON line a staleness (0: sampling and training in turn; 1: the next round is sampled while this one trains) and
microbatch, which is written to --out as it comes. Each takes its part of --seconds, at least one step behind --warm-up:

- step_seconds: median wall time of a step, the device waited for; steps, how many that is of; slowest_seconds
- answer_seconds: what an environment takes for an answer
- max_tokens_per_microbatch, recompute: fields of the job; null: not given. Over 8,192 tokens, and where captured steps
  would need more memory than there is for them, episodes of a group have their beginning in common
- episodes_per_second: episodes of a step over that; rate_to_first: this over that of the first line
- split: medians of what the sampling took (sampling, reward; beside the training where rounds are ahead), and of the
  trainer: waiting and training; other: the rest of the step
- parts: medians of the parts of the trainer's time (docs/guides/training.md)
- turns, trajectory_tokens: means of an episode; sampled_tokens_per_second: over the wall time of the steps
- read_tokens, prefilled_tokens: of all prompts of turns, and what of it the engine computed; prefix_hits: the share
  that it did not. prefilled_once: prefilled_tokens over the tokens that were new to it, each counted once: 1 if no
  prompt, turn or observation was computed twice (the last token of an answer has no state before the next turn);
  less where chance gives members of a group the same answers
- peak_gb: the most that was allocated on the GPU, 10⁹ bytes, all of the engine included; on a CPU of this process
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from benchmarks.lib.in_process import only_warnings
from benchmarks.lib.random_checkpoint import SHAPES, TINY, checkpoint
from benchmarks.training.pod import (
    TrainingPod,
    end_job,
    forget_peak,
    medians,
    parts_of,
    peak_gb,
    report_to,
    timed_step,
    training_pod,
)
from services.common.errors import TemperError
from services.common.jobs import GrpoJob
from services.common.jobs.trajectories.documents import observation_tokens
from services.common.jobs.trajectories.segments import Observation
from services.common.text.tokenizer import TextCodec
from services.engine.observability.events import EngineEvent, EventStream, StepDone
from services.trainer.host.policy_host import PolicyHost
from services.trainer.host.rollouts import Completion, RolloutRequest, RolloutStream
from services.trainer.jobs.rollouts.episode_run import EpisodeRun
from services.trainer.sampling.answers import ReadAnswer
from services.trainer.sampling.environments.rounds import EpisodeRound
from services.trainer.sampling.environments.world import Outcome

RANK = 16
_ROUNDS = 10_000
"""More than any budget has time for."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a step."""

    groups: int
    episodes: int
    turns: int
    system: int
    observation: int
    action: int

    @property
    def trajectory(self) -> int:
        """Tokens of a whole episode."""
        return self.system + self.turns * self.action + (self.turns - 1) * self.observation


FULL = Sizes(8, 8, 6, 512, 200, 128)
SMALL = Sizes(2, 4, 3, 48, 24, 8)


def filler(tokens: Callable[[str], int], wanted: int) -> str:
    """A text of that many tokens, or as close below as words come."""
    words = ["it"]
    while tokens(" ".join([*words, "it"])) <= wanted:
        words.append("it")
    return " ".join(words)


class ScriptedWorld:
    """Says the same after every answer, and ends with a reward that is drawn: groups have spread."""

    def __init__(self, turns: int, said: str, reward: float, answer_seconds: float) -> None:
        self._left = turns
        self._said = said
        self._reward = reward
        self._answer_seconds = answer_seconds

    async def begin(self, params: Mapping[str, Any]) -> str:
        """See World.begin."""
        del params
        return ""

    async def state(self) -> str:
        """See World.state."""
        return ""

    async def act(self, answer: ReadAnswer) -> Outcome:
        """See World.act."""
        del answer
        await asyncio.sleep(self._answer_seconds)
        self._left -= 1
        if not self._left:
            return Outcome(reward=self._reward, done=True)
        return Outcome([{"role": "user", "content": self._said}])


class ScriptedWorlds:
    """Implements Worlds in this process."""

    def __init__(self, turns: int, said: str, answer_seconds: float) -> None:
        self._turns = turns
        self._said = said
        self._answer_seconds = answer_seconds
        self._rewards = random.Random(0)

    @contextlib.asynccontextmanager
    async def open(self, tools: Sequence[Mapping[str, Any]]) -> AsyncIterator[ScriptedWorld]:
        """See Worlds.open."""
        del tools
        yield ScriptedWorld(self._turns, self._said, self._rewards.random(), self._answer_seconds)


@dataclass(slots=True)
class Reading:
    """What the engine was asked to read, and what it computed of it."""

    read: int = 0
    new: float = 0.0
    """Tokens that it had not seen before, each once."""
    prefilled: int = 0

    def listen(self, event: EngineEvent) -> None:
        """Takes an event of the engine."""
        if isinstance(event, StepDone):
            self.prefilled += event.prefill_tokens


class WholeTurns:
    """A stream whose answers are not cut off where they are as long as they may be: chance ends no turn."""

    def __init__(self, stream: RolloutStream, sizes: Sizes, reading: Reading) -> None:
        self._stream = stream
        self._sizes = sizes
        self._reading = reading

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def submit(
        self, request: RolloutRequest, max_tokens: int, done: Callable[[Completion | TemperError], None]
    ) -> None:
        """See RolloutStream.submit."""
        tokens, sizes = len(request.prompt), self._sizes
        first = tokens <= sizes.system
        self._reading.read += tokens
        self._reading.new += tokens / sizes.episodes if first else sizes.observation + 1
        self._stream.submit(
            request,
            max_tokens,
            lambda found: done(replace(found, truncated=False) if isinstance(found, Completion) else found),
        )


class _Around:
    """Something of which only a part is replaced."""

    def __init__(self, inner: Any, **replaced: Any) -> None:
        self._inner = inner
        self.__dict__ |= replaced

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def host_around(pod: TrainingPod, sizes: Sizes, reading: Reading) -> PolicyHost:
    """The pod's host, with such streams."""

    @contextmanager
    def stream(*given: Any) -> Iterator[WholeTurns]:
        with pod.host.rollouts.stream(*given) as made:
            yield WholeTurns(made, sizes, reading)

    return cast("PolicyHost", _Around(pod.host, rollouts=_Around(pod.host.rollouts, stream=stream)))


@dataclass(frozen=True, slots=True)
class Variant:
    """What is compared: fields of the job, and how long an environment takes to answer."""

    staleness: int
    answer_seconds: float = 0.0
    max_tokens_per_microbatch: int | None = None
    recompute: str | None = None

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in asdict(self).items() if value is not None)

    def training(self) -> dict[str, Any]:
        """Fields of the job's training that are given."""
        given = {"max_tokens_per_microbatch": self.max_tokens_per_microbatch, "recompute": self.recompute}
        return {name: value for name, value in given.items() if value is not None}


def scripted_run(pod: TrainingPod, sizes: Sizes, reading: Reading, variant: Variant) -> EpisodeRun:
    """A job of many rounds, a step each."""
    codec = pod.host.codec
    prompts = [_prompt(codec, sizes, number) for number in range(4 * sizes.groups)]
    spec = GrpoJob.model_validate(
        {
            "adapter": "agents",
            "learning_rate": 1e-5,
            "lora": {"rank": RANK},
            **variant.training(),
            "generate": {
                "prompts": [{"messages": prompt} for prompt in prompts],
                "rounds": _ROUNDS,
                "prompts_per_round": sizes.groups,
                "completions": sizes.episodes,
                "max_tokens": sizes.action,
                "staleness": variant.staleness,
                "reward": {
                    "type": "environment",
                    "url": "http://127.0.0.1:9",
                    "max_turns": sizes.turns,
                    "concurrency": sizes.groups * sizes.episodes,
                },
            },
        }
    )

    def said(text: str) -> int:
        seen = Observation.model_validate({"type": "observation", "messages": [{"role": "user", "content": text}]})
        return len(observation_tokens(codec, seen, after=[5], options=spec.chat_template_kwargs))

    worlds = ScriptedWorlds(sizes.turns, filler(said, sizes.observation), variant.answer_seconds)

    class ScriptedRun(EpisodeRun):
        def _worlds(self, *given: Any) -> Any:
            del given
            return worlds

    run = ScriptedRun.prepare(spec, host_around(pod, sizes, reading), None)
    if not isinstance(run, EpisodeRun):
        raise TypeError("not a job of episodes")
    return run


def _prompt(codec: TextCodec, sizes: Sizes, number: int) -> list[dict[str, str]]:
    def chat(text: str) -> list[dict[str, str]]:
        return [{"role": "system", "content": f"Task {number}: {text}"}, {"role": "user", "content": "Begin."}]

    return chat(filler(lambda text: len(codec.encode_chat(chat(text))), sizes.system))


def measure(
    pod: TrainingPod, sizes: Sizes, reading: Reading, variant: Variant, *, seconds: float, warm_up: int, most: int
) -> dict[str, Any]:
    """Steps of a job until the time is up, in the fields above."""
    until = time.monotonic() + seconds
    reading.read, reading.new, reading.prefilled = 0, 0.0, 0
    run = scripted_run(pod, sizes, reading, variant)
    rows: list[tuple[float, dict[str, float]]] = []
    episodes: list[int] = []
    tokens: list[int] = []
    last = 0.0
    try:
        for index in range(warm_up + most):
            # A step more has to fit, as far as the last one tells.
            if index > warm_up and time.monotonic() + last > until:
                break
            if index == warm_up:
                forget_peak(pod.host)
            last, metrics = timed_step(pod.host, run, index)
            print(f"{variant}, step {index}: {last:.2f} s", file=sys.stderr, flush=True)
            if index < warm_up:
                continue
            rows.append((last, metrics))
            if isinstance(run.round, EpisodeRound):
                played = [one for group in run.round.groups() for one in group.played]
                episodes.append(len(played))
                tokens.append(sum(len(action.token_ids) for one in played for action in one.actions))
    finally:
        run.close()
    step = statistics.median(took for took, _ in rows)
    return {
        **asdict(variant),
        "step_seconds": round(step, 4),
        "slowest_seconds": round(max(took for took, _ in rows), 4),
        "steps": len(rows),
        "episodes": statistics.median(episodes),
        "episodes_per_second": round(statistics.median(episodes) / step, 3),
        "split": medians([_split(took, metrics) for took, metrics in rows]),
        "parts": medians([parts_of(metrics) for _, metrics in rows]),
        "turns": round(statistics.fmean(metrics["environment_turns"] for _, metrics in rows), 3),
        "trajectory_tokens": sizes.trajectory,
        "sampled_tokens_per_second": round(sum(tokens) / sum(took for took, _ in rows), 1),
        "trained_inputs_per_step": round(
            statistics.fmean(metrics["tokens_per_second"] * metrics["train_seconds"] for _, metrics in rows)
        ),
        "read_tokens": reading.read,
        "prefilled_tokens": reading.prefilled,
        "prefix_hits": round(1 - reading.prefilled / reading.read, 4),
        "prefilled_once": round(reading.prefilled / reading.new, 4),
        "staleness_mean": statistics.fmean(metrics["staleness_mean"] for _, metrics in rows),
        "peak_gb": round(peak_gb(pod.host), 2),
    }


def _split(took: float, metrics: Mapping[str, float]) -> dict[str, float]:
    reward = metrics["reward_seconds"]
    waiting, training = metrics["waiting_seconds"], metrics["train_seconds"]
    return {
        "sampling": metrics["sampling_seconds"] - reward,
        "reward": reward,
        "waiting": waiting,
        "training": training,
        "other": took - waiting - training,
    }


def _microbatch(given: str) -> tuple[int, str | None]:
    tokens, _, recompute = given.partition(":")
    return int(tokens), recompute or None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=(*SHAPES, "tiny"), default="qwen3.5-4b")
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm/temper-bench"), help="for random checkpoints")
    parser.add_argument("--staleness", default="0,1", help="one job each, in this order")
    parser.add_argument(
        "--microbatches",
        type=lambda given: [_microbatch(one) for one in given.split(",")],
        default=[(None, None)],
        metavar="TOKENS:RECOMPUTE,…",
        help="each with every staleness, e.g. 2048:none,16384:selective",
    )
    parser.add_argument("--answer-seconds", default="0", help="of an environment, e.g. 0,1: each with all of the above")
    parser.add_argument("--train-memory", default="0", help="memory of training, e.g. 40GiB; 0: the plan's")
    parser.add_argument("--seconds", type=float, default=100.0, help="for all steps, without the start of the engine")
    parser.add_argument("--steps", type=int, default=5, help="most steps of each that count")
    parser.add_argument("--warm-up", type=int, default=1, help="steps of each that do not")
    parser.add_argument("--out", type=Path, help="append each line to this file")
    options = parser.parse_args()
    only_warnings()
    small = options.shape == "tiny"
    sizes, reading = (SMALL if small else FULL), Reading()
    variants = [
        Variant(int(level), seconds, *one)
        for seconds in map(float, options.answer_seconds.split(","))
        for one in options.microbatches
        for level in options.staleness.split(",")
    ]
    began = time.monotonic()
    model = TINY if small else checkpoint(options.shape, options.scratch)
    # A few tokens more than an episode has: its turns are asked for as long as the longest may be.
    room = sizes.trajectory + 64
    with training_pod(
        model,
        options.device,
        events=EventStream(reading.listen),
        max_num_seqs=sizes.groups * sizes.episodes,
        max_lora_rank=RANK,
        max_train_tokens=room,
        max_model_len=room,
        train_memory_bytes=options.train_memory,
    ) as pod:
        report = report_to(options, start_seconds=round(time.monotonic() - began, 1))
        first: float | None = None
        for variant in variants:
            line = measure(
                pod,
                sizes,
                reading,
                variant,
                seconds=options.seconds / len(variants),
                warm_up=options.warm_up,
                most=options.steps,
            )
            first = line["episodes_per_second"] if first is None else first
            report({"benchmark": "agents", **line, "rate_to_first": round(line["episodes_per_second"] / first, 3)})
            end_job(pod.host)


if __name__ == "__main__":
    main()
