"""Kahneman-Tversky optimisation: every example within the limit."""

from __future__ import annotations

from services.common.jobs import KtoExample, KtoJob
from services.common.jobs.documents import answer_documents
from services.common.jobs.kinds.kto import check_held_out, check_labels
from services.gateway.api.training.validation.common import check_conversation, check_examples
from services.gateway.engines.pool import ServedModel


def check_kto(served: ServedModel, job: KtoJob) -> None:
    """See check_training_job."""
    for name, example in job.numbered_examples():
        messages = "messages" if example.prompt is None else "prompt"
        check_conversation(name, example.asked, example.tools, messages=messages)

    def tokens(example: KtoExample) -> int:
        return answer_documents(served.codec, job, example, (example.completion,), 0)[0].length

    kept = check_examples(served, job, tokens, overlong=job.overlong, way_out="shorten it, or choose overlong 'drop'")
    check_labels([example.label for example in kept.trained])
    if job.held_out or job.eval_examples:
        check_held_out(len(kept.held_out), "eval_examples" if job.eval_examples else "eval_fraction")
