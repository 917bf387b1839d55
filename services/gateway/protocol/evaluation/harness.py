"""Bodies of /v1/evaluations/import and of results in lm-evaluation-harness' form."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from services.common.validation.strict_models import SentModel


class HarnessImport(SentModel):
    """POST /v1/evaluations/import: what lm-evaluation-harness wrote of one model."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    results: dict[str, Any]
    """Object of results_*.json."""
    samples: dict[str, str] = Field(min_length=1, max_length=256)
    """By task, the text of samples_{task}_*.jsonl, with every document (--log_samples)."""
    metrics: dict[str, str] = Field(default_factory=dict)
    """By task, the metric with its filter as the results name it, e.g. "exact_match,flexible-extract"; a task that is
    left out: its first one."""
    metadata: dict[str, str] = Field(default_factory=dict)


class HarnessSamples(BaseModel):
    """A page of the rows of samples_{task}_*.jsonl."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    object: Literal["list"] = "list"
    task: str
    """Name of the task that the suite is in the results."""
    data: list[dict[str, Any]]
    has_more: bool
