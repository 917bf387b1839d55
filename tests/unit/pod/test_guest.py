"""An engine that is another one's guest, on the tiny model: what else the trainer's thread does beside it."""

from __future__ import annotations

from pathlib import Path

import torch

from services.common.jobs.scorers.grants import Grants
from services.pod.engine import Guest
from services.pod.forging.engines import TrainerTurns, engine_settings, opened
from services.trainer.host.rollouts import RolloutRequest, RolloutSampling
from tests.rollout_support import TINY, running_pod

ASKED, TOKENS = 6, 24


def test_the_trainer_computes_for_sessions_while_a_guest_answers(tmp_path: Path) -> None:
    """Training sessions compute in the pauses of a job, and a guest's steps are no pauses of the thread that waits for
    them: both come to the same gate."""
    computed = 0
    with running_pod() as pod:
        gate = pod.host.gate

        def session() -> None:
            nonlocal computed
            with gate.training():
                torch.zeros(64, 64) @ torch.zeros(64, 64)
                gate.give_way()
            computed += 1

        guest = Guest(TrainerTurns(gate), pod.host.train_memory_bytes)
        with opened(engine_settings(TINY, "cpu"), tmp_path, Grants(), guest) as host:
            requests = [RolloutRequest((3, 17, 250 + number), number) for number in range(ASKED)]
            sampling = RolloutSampling(temperature=1.0, max_tokens=TOKENS)
            done = []
            while computed < 3 and len(done) < 20 * ASKED:
                done += host.rollouts.generate(requests, sampling, None, interrupt=session)
        assert computed >= 3
        assert all(completion.token_ids for completion in done)
        user = pod.user()
        assert len(user.answer(user.submit((3, 17, 250), max_tokens=8))) == 8
