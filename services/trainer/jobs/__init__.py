"""Jobs as they run. A kind that trains is a module of its name here, whose function `prepare` makes a run of a spec and
the files of the adapter to continue from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

from services.common.errors import InvalidRequest
from services.common.jobs import DraftJob, MergeJob, PublishingSpec
from services.common.text.template import RESERVED_KWARGS
from services.trainer.host.policy_host import PolicyHost
from services.trainer.jobs.base import JobRun
from services.trainer.parent_versions import ParentVersion


def prepare_run(
    spec: PublishingSpec,
    host: PolicyHost,
    parent: Mapping[str, bytes] | None,
    sources: Sequence[ParentVersion] = (),
    interrupt: Callable[[], None] = lambda: None,
) -> JobRun:
    """Tokenizes, validates and sizes a job; touches nothing that is being served.

    Args:
        spec: the job, with rollouts of completion ids already resolved to token ids by the gateway.
        host: the pod the job runs in.
        parent: files of the adapter version to continue from, None for a new adapter.
        sources: of a merge, in the order of its sources.
        interrupt: called several times a second where the engine answers something first; may raise.

    Raises:
        InvalidRequest: the data cannot be trained on; the message names the example or field.
        DoesNotFit: the job needs more memory than the host's plan leaves; the message has the numbers.
        AdapterRejected: the parent's files, or a teacher's, do not bind to this base model.
        Unavailable: the object store, which has the teacher, does not answer.
    """
    # Modules are imported when a job asks for them: a worker can be imported without what its jobs may never need.
    if isinstance(spec, MergeJob):
        from services.trainer.jobs.merge import MergeRun

        return MergeRun(spec, host, sources)

    # A job that came straight from Redis has been seen by no gateway.
    if taken := sorted((RESERVED_KWARGS | {"self"}) & spec.chat_template_kwargs.keys()):
        raise InvalidRequest(
            f"chat_template_kwargs must not contain {', '.join(taken)}: the job itself sets it",
            param="chat_template_kwargs",
        )
    prepare = import_module(f"{__name__}.{spec.kind}").prepare
    run: JobRun = prepare(spec, host, parent, *((interrupt,) if isinstance(spec, DraftJob) else ()))
    return run
