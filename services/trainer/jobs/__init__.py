"""One module a kind of job; `prepare_run` chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import assert_never

from services.common.errors import InvalidRequest
from services.common.jobs import DpoJob, GrpoJob, KtoJob, MergeJob, OpdJob, SftJob, Spec
from services.common.text.template import RESERVED_KWARGS
from services.trainer.host.policy_host import PolicyHost
from services.trainer.jobs.base import JobRun
from services.trainer.parents import Origin


def prepare_run(
    spec: Spec, host: PolicyHost, parent: Mapping[str, bytes] | None, sources: Sequence[Origin] = ()
) -> JobRun:
    """Tokenizes, validates and sizes a job; touches nothing that is being served.

    Args:
        spec: the job, with rollouts of completion ids already resolved to token ids by the gateway.
        host: the pod the job runs in.
        parent: files of the adapter version to continue from, None for a new adapter.
        sources: of a merge, in the order of its sources.

    Raises:
        InvalidRequest: the data cannot be trained on; the message names the example or field.
        DoesNotFit: the job needs more memory than the host's plan leaves; the message has the numbers.
        AdapterRejected: the parent's files, or a teacher's, do not bind to this base model.
        Unavailable: the object store, which has the teacher, does not answer.
    """
    # Imported here so that a worker can be imported without loading torch models it may never need.
    from services.trainer.jobs.dpo import DpoRun
    from services.trainer.jobs.grpo import GrpoRun
    from services.trainer.jobs.kto import KtoRun
    from services.trainer.jobs.merge import MergeRun
    from services.trainer.jobs.opd import OpdRun
    from services.trainer.jobs.rollout import RolloutRun
    from services.trainer.jobs.sft import SftRun

    if isinstance(spec, MergeJob):
        return MergeRun(spec, host, sources)

    # A job that came straight from Redis has been seen by no gateway.
    if taken := sorted((RESERVED_KWARGS | {"self"}) & spec.chat_template_kwargs.keys()):
        raise InvalidRequest(
            f"chat_template_kwargs must not contain {', '.join(taken)}: the job itself sets it",
            param="chat_template_kwargs",
        )
    match spec:
        case SftJob():
            return SftRun.prepare(spec, host, parent)
        case DpoJob():
            return DpoRun.prepare(spec, host, parent)
        case KtoJob():
            return KtoRun.prepare(spec, host, parent)
        case GrpoJob():
            made = GrpoRun if spec.generate is None else RolloutRun
            return made.prepare(spec, host, parent)
        case OpdJob():
            return OpdRun.prepare(spec, host, parent)
        case _:
            assert_never(spec)
