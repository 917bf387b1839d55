"""Training dashboard: running jobs, their progress, and the queue."""

from __future__ import annotations

from observability.board import Board, Panel, Query, Row
from observability.objectives import BETWEEN_TOKENS
from observability.series import chosen, everywhere, quantile, rate, total

_QUEUED = 'state="queued"'
_TRAINING = 'queue="training"'


def _now(name: str) -> tuple[Query, ...]:
    return (Query(chosen(name), "{{pod}} {{kind}}"),)


_GLANCE = Row(
    "At a glance",
    (
        Panel(
            "Running",
            "Jobs that run now.",
            (Query(total(chosen("temper_trainer_running"))),),
            kind="number",
            width=4,
            base="blue",
        ),
        Panel(
            "Queued",
            "Training jobs that wait.",
            (Query(f"max({everywhere('temper_gateway_jobs', _TRAINING, _QUEUED)})"),),
            kind="number",
            width=4,
            steps=((10, "yellow"), (100, "red")),
            alerts=("TemperJobsWait",),
        ),
        Panel(
            "Oldest queued",
            "Since the oldest waiting job was submitted.",
            (Query(f"max({everywhere('temper_gateway_job_oldest_queued_seconds', _TRAINING)})"),),
            kind="number",
            unit="dtdurations",
            width=4,
            steps=((3600, "yellow"), (4 * 3600, "red")),
            alerts=("TemperJobsWait",),
        ),
        Panel(
            "Done",
            "Share of the running jobs' steps that are done.",
            (
                Query(
                    f"{total(chosen('temper_trainer_job_step'), 'pod')} / "
                    f"{total(chosen('temper_trainer_job_total_steps'), 'pod')}",
                    "{{pod}}",
                ),
            ),
            kind="number",
            unit="percentunit",
            width=4,
            base="blue",
        ),
        Panel(
            "Trained tokens",
            "A second, of all trainers.",
            (Query(total(rate(chosen("temper_trainer_tokens_total")))),),
            kind="number",
            width=4,
            base="blue",
        ),
        Panel(
            "Dead letters",
            "What the queue gave up on and keeps.",
            (Query(f"max({everywhere('temper_gateway_dead_letters', _TRAINING)})"),),
            kind="number",
            width=4,
            steps=((1, "red"),),
            alerts=("TemperDeadLetters",),
        ),
    ),
)

_JOB = Row(
    "The running jobs",
    (
        Panel("Loss", "Of the last step.", _now("temper_trainer_job_loss"), unit="none"),
        Panel(
            "Reward",
            "Mean reward of the last step's rollouts. It should rise; a fall to the lowest reward means a broken "
            "policy.",
            _now("temper_trainer_job_reward"),
            unit="none",
        ),
        Panel(
            "Divergence",
            "From the reference, in the last step. A steep rise comes before a policy breaks.",
            _now("temper_trainer_job_kl"),
            unit="none",
        ),
        Panel(
            "Steps",
            "Done by each running job, and how many it has.",
            (
                Query(chosen("temper_trainer_job_step"), "{{pod}} done"),
                Query(chosen("temper_trainer_job_total_steps"), "{{pod}} all"),
            ),
            low=0,
            alerts=("TemperJobStuck",),
        ),
        Panel(
            "Signs of reward hacking",
            "Whether what a running job samples drifts as its reward rises: longer, cut off, repeated. "
            "From two on, read its samples.",
            _now("temper_trainer_job_hacking_signs"),
            low=0,
            alerts=("TemperRewardGamed",),
        ),
        Panel(
            "Environments that fail",
            "While episodes are played, by reason, and the episodes that were dropped for it.",
            (
                Query(
                    f"sum by (reason) (increase({chosen('temper_trainer_environment_failures_total')}[10m]))",
                    "{{reason}}",
                ),
                Query(f"sum(increase({chosen('temper_trainer_dropped_episodes_total')}[10m]))", "dropped episodes"),
            ),
            low=0,
        ),
        Panel(
            "Rollouts that were cut",
            "With the tail of their round: those that go on in the next round, and those that were dropped; and how "
            "often one under way went on with a newer policy.",
            (
                Query(f"sum by (then) (increase({chosen('temper_trainer_cut_rollouts_total')}[10m]))", "{{then}}"),
                Query(f"sum(increase({chosen('temper_trainer_changed_rollouts_total')}[10m]))", "changed"),
            ),
            low=0,
        ),
        Panel(
            "Where the time goes",
            "Seconds a second. The trainer waits or trains; where rounds are sampled ahead, sampling and rewards go on "
            "beside it.",
            (Query(f"sum by (part) (rate({chosen('temper_trainer_part_seconds_total')}[10m]))", "{{part}}"),),
            low=0,
        ),
        Panel("Tokens a second", "Of the last step.", _now("temper_trainer_job_tokens_per_second"), low=0),
        Panel(
            "Since the last step",
            "Of a running job. Rollout rounds and evaluations belong to a step.",
            (
                Query(
                    f"(time() - {chosen('temper_trainer_progress_timestamp_seconds')}) "
                    f"* on (namespace, pod) ({chosen('temper_trainer_running')} > bool 0)",
                    "{{pod}}",
                ),
            ),
            unit="s",
            low=0,
            alerts=("TemperJobStuck",),
        ),
    ),
)

_TRAINER = Row(
    "Trainer and engine",
    (
        Panel(
            "Step time",
            "Wall time of optimizer steps.",
            (
                Query(quantile(0.5, chosen("temper_trainer_step_seconds_bucket")), "p50"),
                Query(quantile(0.95, chosen("temper_trainer_step_seconds_bucket")), "p95"),
            ),
            unit="s",
            low=0,
        ),
        Panel(
            "Waiting for the device",
            "Share of time that a trainer waits because serving has the device. Near 1 it hardly advances.",
            (Query(rate(chosen("temper_trainer_gate_wait_seconds_total")), "{{pod}}"),),
            unit="percentunit",
            low=0,
            high=1,
            steps=((0.85, "red"),),
            alerts=("TemperTrainerStarves",),
        ),
        Panel(
            "What training costs serving",
            "Time between tokens, p95. Compare while a job runs and while none does.",
            (Query(quantile(0.95, chosen("temper_gateway_inter_token_latency_seconds_bucket")), "p95", True),),
            unit="s",
            low=0,
            steps=((BETWEEN_TOKENS.value, "red"),),
            alerts=("TemperTokensLate",),
        ),
        Panel(
            "Jobs by outcome",
            "Jobs that trainers let go of in an hour. requeued: at a shutdown; lost: another trainer took it over.",
            (Query(f"sum by (outcome) (increase({chosen('temper_trainer_jobs_total')}[1h]))", "{{outcome}}"),),
            kind="stack",
            low=0,
            alerts=("TemperJobFailed", "TemperJobsCrash"),
        ),
        Panel(
            "Queues",
            "Jobs and batches in Redis.",
            (Query(f"max by (queue, state) ({everywhere('temper_gateway_jobs')})", "{{queue}} {{state}}"),),
            low=0,
            alerts=("TemperJobsWait",),
        ),
        Panel(
            "Sessions",
            "Training sessions that are open, and their calls a second by outcome.",
            (
                Query(total(chosen("temper_trainer_sessions")), "open"),
                Query(
                    total(rate(chosen("temper_trainer_session_calls_total")), "operation, outcome"),
                    "{{operation}} {{outcome}}",
                ),
            ),
            low=0,
        ),
        Panel(
            "Calls of sessions, p95",
            "From a call's submission to its end.",
            (
                Query(
                    quantile(0.95, chosen("temper_trainer_session_call_seconds_bucket"), "operation"), "{{operation}}"
                ),
            ),
            unit="s",
            low=0,
        ),
        Panel(
            "Batches",
            "Requests of batches a second by status, and batches that run.",
            (
                Query(total(rate(chosen("temper_gateway_batch_requests_total")), "status"), "{{status}}"),
                Query(total(chosen("temper_gateway_batches_running")), "running"),
            ),
            low=0,
        ),
    ),
)

_CANARIES = Row(
    "Canaries",
    (
        Panel(
            "Running canaries",
            "Canaries that run.",
            (Query(f"max({chosen('temper_gateway_canaries')})"),),
            kind="number",
            decimals=0,
        ),
        Panel(
            "Last look at a canary",
            "Since the controller looked at the canary that it has looked at least recently.",
            (Query(f"max({chosen('temper_gateway_canary_look_age_seconds')})", "age"),),
            unit="s",
            low=0,
            alerts=("TemperCanaryUnwatched",),
        ),
        Panel(
            "Answers in canaries",
            "Answers of both arms a second, by outcome.",
            (
                Query(
                    total(rate(chosen("temper_gateway_canary_answers_total")), "adapter, arm, outcome"),
                    "{{adapter}} {{arm}} {{outcome}}",
                ),
            ),
            low=0,
        ),
        Panel(
            "Canaries ended",
            "Canaries that ended in the last day, by state and reason.",
            (
                Query(
                    f"sum by (state, reason) (increase({chosen('temper_gateway_canaries_ended_total')}[1d]))",
                    "{{state}} {{reason}}",
                ),
            ),
            low=0,
            alerts=("TemperCanaryRolledBack",),
        ),
    ),
)

_LEARNERS = Row(
    "Learners",
    (
        Panel(
            "State",
            "Where each learner stands.",
            (Query(f"max by (learner, state) ({chosen('temper_learner_state')}) == 1", "{{learner}} {{state}}"),),
            low=0,
            alerts=("TemperLearnerStopped",),
        ),
        Panel(
            "New rows",
            "Feedback and logged requests since the last cycle's.",
            (Query(f"max by (learner) ({chosen('temper_learner_rows_waiting')})", "{{learner}}"),),
            low=0,
        ),
        Panel(
            "In this state",
            "Since a learner came into its state.",
            (
                Query(
                    f"max by (learner) (time() - {chosen('temper_learner_state_entered_timestamp_seconds')})",
                    "{{learner}}",
                ),
            ),
            unit="s",
            low=0,
            alerts=("TemperLearnerStuck",),
        ),
        Panel(
            "Cycles",
            "In the last day, by outcome.",
            (
                Query(
                    f"sum by (learner, outcome) (increase({chosen('temper_learner_cycles_total')}[1d]))",
                    "{{learner}} {{outcome}}",
                ),
            ),
            low=0,
            alerts=("TemperLearnerFails",),
        ),
    ),
)

TRAINING = Board(
    "training",
    "Temper / Training",
    "Jobs, their progress, and how trainer and engine share the device.",
    (_GLANCE, _JOB, _CANARIES, _LEARNERS, _TRAINER),
)
