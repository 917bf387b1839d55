"""A thousand faults: `python -m benchmarks.training.environments.faults --out benchmarks/results/environments`.

A job of the tiny model plays the guessing game with a server of which a share of the answers is a fault: silence, a cut
or closed connection, no JSON, half a message, bytes, messages of a wrong form, rewards that are none, 2 MiB at once, no
room, errors of its own. Rounds go on until there have been so many faults. Behind each round its data is looked
through: each turn but the last was answered, and every reward is one that the game gave.

Then a job meets a server of which every answer is the same fault, for each kind of fault: it ends with the reason, and
its adapter is as it was. One JSON line; a minute or two on two CPU cores.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.environment import environment
from benchmarks.lib.in_process import only_warnings
from benchmarks.lib.random_checkpoint import TINY
from benchmarks.training.environments.serving import Fault, FaultyServer, misbehaving
from benchmarks.training.pod import TrainingPod, end_job, training_pod
from services.common.errors import Unavailable
from services.common.jobs import GrpoJob
from services.common.jobs.trajectories.segments import Trajectory
from services.environments.guess import Guess
from services.trainer.jobs import prepare_run
from services.trainer.jobs.rollouts.episode_run import EpisodeRun
from services.trainer.sampling.environments.rounds import EpisodeRound
from services.trainer.settings import TrainerSettings

_ROUNDS = 1000
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 64,
    "token_budget": 512,
    "num_blocks": 2049,
    "max_train_tokens": 256,
    "state_snapshots": 64,
}


def prepared(made: TrainingPod, url: str, **reward: Any) -> EpisodeRun:
    """The job."""
    fields: dict[str, Any] = {
        "type": "environment",
        "url": url,
        "max_turns": 2,
        "max_trajectory_tokens": 128,
        "timeout_seconds": 1.0,
        "concurrency": 64,
        **reward,
    }
    spec = {
        "adapter": "player",
        "learning_rate": 1e-3,
        "lora": {"rank": 4},
        "generate": {
            "prompts": ["{observation}"] * 4,
            "rounds": _ROUNDS,
            "completions": 16,
            "max_tokens": 4,
            "temperature": 2.0,
            "reward": fields,
        },
    }
    run = prepare_run(GrpoJob.model_validate(spec), made.host, None)
    if not isinstance(run, EpisodeRun):
        raise TypeError(f"not a job of episodes: {run!r}")
    return run


def half_turns(run: EpisodeRun) -> int:
    """Trajectories of the present round that are not what the game gave: a turn without an answer, another reward, or
    an end that is none."""
    kept = run.round
    if not isinstance(kept, EpisodeRound):
        raise TypeError("the job has played no round")
    wrong = 0
    for trajectory in (one for group in kept.groups() for one in group.trajectories or ()):
        if not isinstance(trajectory, Trajectory):
            raise TypeError("a round has what it played, nothing that is still to be looked up")
        actions = trajectory.actions
        rewards = [action.reward for action in actions]
        answered = len(trajectory.segments) == 2 * len(actions) - 1
        ended = trajectory.truncated or rewards[-1] == 1.0 or len(actions) == 2
        wrong += not (answered and ended and set(rewards) <= {0.0, 1.0} and 1.0 not in rewards[:-1])
    return wrong


def going_on(made: TrainingPod, url: str, server: FaultyServer, count: int) -> dict[str, Any]:
    """A job that goes on through so many faults."""
    totals: Counter[str] = Counter()
    began = time.perf_counter()
    run = prepared(made, url, attempts=2, max_dropped=0.9)
    rounds = wrong = 0
    while server.count < count:
        metrics = run.step(rounds)
        rounds += 1
        wrong += half_turns(run)
        totals.update({name: int(value) for name, value in metrics.items() if name.startswith("environment_f")})
        totals.update({name: int(metrics[f"environment_{name}"]) for name in ("dropped", "retried")})
    end_job(made.host)
    return {
        "faults": server.count,
        "faults_by_kind": {fault.value: made for fault, made in server.made.items()},
        "failures": {name.removeprefix("environment_failures_"): n for name, n in totals.items() if "failures" in name},
        "episodes": rounds * 64,
        "rounds": rounds,
        "dropped": totals["dropped"],
        "retried": totals["retried"],
        "half_turns": wrong,
        "seconds": round(time.perf_counter() - began, 1),
    }


def ending(made: TrainingPod, url: str, fault: Fault) -> str:
    """The reason with which a job ends when every answer is this fault."""
    run = prepared(made, url, attempts=1, timeout_seconds=0.5 if fault is Fault.SILENT else 10.0)
    before = run.files("")
    try:
        run.step(0)
    except Unavailable as error:
        if run.files("") != before:
            raise ValueError(f"{fault}: the adapter has changed") from error
        return error.message
    finally:
        end_job(made.host)
    raise ValueError(f"{fault}: the job went on")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--out", type=Path, required=True, help="directory for faults.json")
    options = parser.parse_args()
    only_warnings()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    server = FaultyServer(Guess, share=0.2, seed=0)
    with (
        misbehaving(server) as url,
        training_pod(TINY, "cpu", trainer=TrainerSettings(reward_webhooks=url), **SETTINGS) as made,
    ):
        found = going_on(made, url, server, options.faults)
        found["reasons"] = {}
        for fault in Fault:
            server.behave(1.0, (fault,))
            found["reasons"][fault.value] = ending(made, url, fault)
    (options.out / "faults.json").write_text(json.dumps(found | environment(), indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
