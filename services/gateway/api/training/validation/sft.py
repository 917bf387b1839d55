"""Supervised fine-tuning: every example can be learnt as it stands, and is within the limit or under its policy."""

from __future__ import annotations

from services.common.jobs import SftExample, SftJob
from services.common.jobs.documents import Document
from services.common.jobs.kinds.sft import example_documents
from services.gateway.api.training.validation.common import check_conversation, check_split, over
from services.gateway.engines.pool import ServedModel


def check_sft(served: ServedModel, job: SftJob) -> None:
    """See check_training_job. The documents are those that the trainer makes."""
    limit = served.info.max_train_tokens

    def left(name: str, document: Document) -> bool:
        if not limit or document.length <= limit:
            return True
        if job.overlong == "error":
            raise over(name, document.length, limit, "shorten it, or choose overlong 'drop' or 'truncate'")
        return job.overlong == "truncate" and any(document.trained[:limit])

    def fits(name: str, example: SftExample) -> bool:
        check_conversation(name, example.messages, example.tools, messages="messages")
        check_conversation(name, example.prompt, None, messages="prompt")
        field, _, index = name.removesuffix("]").partition("[")
        documents = example_documents(served.codec, job, example, int(index), field=field)
        kept = [left(name, document) for document in documents]
        return any(kept)

    check_split(served, job, fits)
