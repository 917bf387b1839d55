"""Kahneman-Tversky optimisation: every example within the limit."""

from __future__ import annotations

from services.common.jobs import KtoExample, KtoJob
from services.common.text.documents import answer_documents
from services.gateway.engines import ServedModel
from services.gateway.training_limits.common import check_conversation, check_examples


def check_kto(served: ServedModel, job: KtoJob) -> None:
    """See check_training_job."""
    for name, example in job.numbered_examples():
        messages = "messages" if example.prompt is None else "prompt"
        check_conversation(name, example.asked, example.tools, messages=messages)

    def tokens(example: KtoExample) -> int:
        return answer_documents(served.codec, job, example, (example.completion,), 0)[0].length

    check_examples(served, job, tokens, overlong=job.overlong, way_out="shorten it, or choose overlong 'drop'")
