"""The running job's numbers, as Prometheus reads them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from services.common.jobs import JobProgress
from services.trainer.metrics import TrainerMetrics

STEP = {"loss": 0.5, "reward_mean": 0.75, "kl": 0.01, "tokens_per_second": 200.0, "train_seconds": 2.0, "lr": 1e-4}


def test_a_job_is_shown_while_it_runs_and_gone_afterwards() -> None:
    registry = CollectorRegistry()
    metrics = TrainerMetrics(registry)
    metrics.job_began("grpo")
    metrics.progress("grpo", JobProgress(step=0, total_steps=8), {})
    metrics.progress("grpo", JobProgress(step=1, total_steps=8), STEP)
    metrics.progress("grpo", JobProgress(step=2, total_steps=8), {**STEP, "loss": 0.25})
    text = generate_latest(registry).decode()
    for line in (
        "temper_trainer_running 1.0",
        'temper_trainer_job_step{kind="grpo"} 2.0',
        'temper_trainer_job_total_steps{kind="grpo"} 8.0',
        'temper_trainer_job_loss{kind="grpo"} 0.25',
        'temper_trainer_job_reward{kind="grpo"} 0.75',
        'temper_trainer_job_kl{kind="grpo"} 0.01',
        'temper_trainer_job_tokens_per_second{kind="grpo"} 200.0',
        'temper_trainer_tokens_total{kind="grpo"} 800.0',
    ):
        assert line in text
    metrics.job_ended()
    text = generate_latest(registry).decode()
    assert 'temper_trainer_job_step{kind="grpo"}' not in text
    assert 'temper_trainer_job_loss{kind="grpo"}' not in text
    assert 'temper_trainer_tokens_total{kind="grpo"} 800.0' in text


def test_outcomes_are_there_before_the_first_job() -> None:
    """Or alerts would not see the first failure."""
    registry = CollectorRegistry()
    TrainerMetrics(registry)
    text = generate_latest(registry).decode()
    assert 'temper_trainer_jobs_total{outcome="crashed"} 0.0' in text
    assert 'temper_trainer_jobs_total{outcome="failed"} 0.0' in text


def test_a_job_without_a_reward_shows_none() -> None:
    registry = CollectorRegistry()
    metrics = TrainerMetrics(registry)
    metrics.job_began("sft")
    metrics.progress("sft", JobProgress(step=1, total_steps=2), {"loss": 1.0})
    text = generate_latest(registry).decode()
    assert 'temper_trainer_job_loss{kind="sft"} 1.0' in text
    assert "temper_trainer_job_reward{" not in text


def test_failures_of_environments_add_up() -> None:
    registry = CollectorRegistry()
    metrics = TrainerMetrics(registry)
    text = generate_latest(registry).decode()
    assert 'temper_trainer_environment_failures_total{reason="timeout"} 0.0' in text
    assert "temper_trainer_dropped_episodes_total 0.0" in text
    metrics.job_began("grpo")
    failed = {"environment_failures_timeout": 3.0, "environment_failures_error": 1.0, "environment_dropped": 2.0}
    metrics.progress("grpo", JobProgress(step=1, total_steps=3), failed)
    metrics.progress("grpo", JobProgress(step=2, total_steps=3), {"loss": 0.5})
    metrics.progress("grpo", JobProgress(step=3, total_steps=3), failed)
    metrics.job_ended()
    text = generate_latest(registry).decode()
    assert 'temper_trainer_environment_failures_total{reason="timeout"} 6.0' in text
    assert 'temper_trainer_environment_failures_total{reason="error"} 2.0' in text
    assert "temper_trainer_dropped_episodes_total 4.0" in text


def test_rollouts_that_were_cut_and_the_split_add_up() -> None:
    registry = CollectorRegistry()
    metrics = TrainerMetrics(registry)
    assert 'temper_trainer_cut_rollouts_total{then="requeued"} 0.0' in generate_latest(registry).decode()
    metrics.job_began("grpo")
    cut = {"rollouts_requeued": 3.0, "rollouts_dropped": 1.0, "rollouts_changed": 2.0}
    split = {"sampling_seconds": 4.0, "reward_seconds": 1.0, "waiting_seconds": 2.5, "train_seconds": 3.0}
    for step in (1, 2):
        metrics.progress("grpo", JobProgress(step=step, total_steps=2), cut | split)
    text = generate_latest(registry).decode()
    for line in (
        'cut_rollouts_total{then="requeued"} 6.0',
        'cut_rollouts_total{then="dropped"} 2.0',
        "changed_rollouts_total 4.0",
        'part_seconds_total{part="sampling"} 6.0',
        'part_seconds_total{part="reward"} 2.0',
        'part_seconds_total{part="waiting"} 5.0',
        'part_seconds_total{part="training"} 6.0',
    ):
        assert f"temper_trainer_{line}" in text
