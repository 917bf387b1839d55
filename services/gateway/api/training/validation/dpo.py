"""Direct preference optimisation: both completions of a pair within the limit, and different."""

from __future__ import annotations

from services.common.errors import InvalidRequest
from services.common.jobs import DpoExample, DpoJob
from services.common.jobs.documents import answer_documents
from services.gateway.api.training.validation.common import check_conversation, check_examples
from services.gateway.engines.pool import ServedModel


def check_dpo(served: ServedModel, job: DpoJob) -> None:
    """See check_training_job."""
    for name, example in job.numbered_examples():
        messages = "messages" if example.prompt is None else "prompt"
        check_conversation(name, example.asked, example.tools, messages=messages)
    check_examples(
        served,
        job,
        lambda example: _tokens(served, job, example),
        overlong=job.overlong,
        way_out="shorten it, or choose overlong 'drop'",
    )


def _tokens(served: ServedModel, job: DpoJob, example: DpoExample) -> int:
    pair = answer_documents(served.codec, job, example, (example.chosen, example.rejected), 0)
    if pair[0].token_ids == pair[1].token_ids:
        raise InvalidRequest("chosen and rejected are the same tokens: the pair prefers nothing, leave it out")
    return max(document.length for document in pair)
