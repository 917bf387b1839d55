"""Supervised fine-tuning: every example can be learnt as it stands, and is within the limit or under its policy."""

from __future__ import annotations

from services.common.errors import InvalidRequest
from services.common.jobs import SftJob
from services.common.text.documents import example_documents
from services.gateway.engines import ServedModel
from services.gateway.training_limits.common import check_conversation, over


def check_sft(served: ServedModel, job: SftJob) -> None:
    """See check_training_job. The documents are those that the trainer makes."""
    limit = served.info.max_train_tokens
    for field, examples in (("examples", job.examples), ("eval_examples", job.eval_examples)):
        kept = 0
        for index, example in enumerate(examples):
            name = f"{field}[{index}]"
            check_conversation(name, example.messages, example.tools, messages="messages")
            check_conversation(name, example.prompt, None, messages="prompt")
            for document in example_documents(served.codec, job, example, index, field=field):
                fits = not limit or document.length <= limit
                if not fits and job.overlong == "error":
                    way_out = "shorten it, or choose overlong 'drop' or 'truncate'"
                    raise over(name, document.length, limit, way_out)
                kept += fits or (job.overlong == "truncate" and any(document.trained[:limit]))
        if examples and not kept:
            raise InvalidRequest(
                f"every one of the {field} is over the limit of {limit} tokens and dropped", param=field
            )
