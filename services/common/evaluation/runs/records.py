"""Records of a run: what it asks of whom, the answers, and the result. Once written they only lose what is erased."""

from __future__ import annotations

from pydantic import Field

from services.common.adapters.evidence import GateEvidence
from services.common.evaluation.statistics.comparison import Test
from services.common.evaluation.statistics.intervals import Method
from services.common.evaluation.suites.spec import SuiteSampling
from services.common.validation.strict_models import StrictModel, absent


class RunSuite(StrictModel):
    """A suite of a run, as it was when the run began."""

    suite: str
    """"name@n"."""
    digest: str
    items: int
    scorer: str
    """Type of the scorer."""
    better: str
    """Whether a "higher" or a "lower" score is better."""
    sampling: SuiteSampling | None
    """null: it is not known, of an imported run."""


class Imported(StrictModel):
    """Origin of results that another program made. They were neither asked for nor scored here."""

    program: str
    model: str
    """As that program names it."""
    date: str = ""
    """As that program writes it."""


CANDIDATE = "candidate"
"""Name of a training job's result among the targets of a run, before it is a version."""


class RunTarget(StrictModel):
    """A target of a run, as it was when the run began."""

    name: str
    """"base", "name@n", the model of another server with its URL, or "candidate": the result of a training job."""
    digest: str | None = None
    """Digest of the adapter's weights; null: there is no adapter, or it is another server's."""


class RunRecord(StrictModel):
    """What a run asks."""

    id: str
    """The job's id."""
    suites: tuple[RunSuite, ...]
    targets: tuple[RunTarget, ...]
    seed: int
    base_digest: str
    """Digest of the base model that the engine serves; empty: it was imported."""
    metadata: dict[str, str] = Field(default_factory=dict)
    job: str | None = None
    """Id of the training job whose gates the run decides; null: it is a job of its own."""
    key_id: str = ""
    """Id of the API key whose run it is; empty: there were no keys."""
    created_at: float
    """Unix seconds."""
    imported: Imported | None = Field(None, exclude_if=absent)
    """null: it was run here."""


class Answer(StrictModel):
    """One answer of a target to an item."""

    text: str
    """What a user would read; of an item that is scored by log-likelihood, empty."""
    score: float
    """0 where the answer is invalid."""
    valid: bool = True
    """Whether the answer could be read and judged. Invalid ones count, with a score of 0."""
    tokens: int = 0
    finish_reason: str = "stop"
    """"stop", "length", "tool_calls", "none" (nothing was sampled), "error", or "unknown" in imported results."""
    reason: str | None = None
    """Reason why it is invalid."""
    tool_calls: tuple[str, ...] = ()
    """Calls that it makes, each as JSON with name and arguments."""
    logprobs: tuple[float, ...] | None = None
    """Log-likelihood of each continuation, of scorers by log-likelihood."""


class ItemResult(StrictModel):
    """Answers of one target to one item, and the item's score."""

    item: str
    index: int
    score: float
    weight: float
    group: str | None = None
    answers: tuple[Answer, ...]

    def without_answers(self) -> ItemResult:
        """The same scores without what was answered."""
        said_nothing = {"text": "", "reason": None, "tool_calls": ()}
        return self.model_copy(update={"answers": tuple(one.model_copy(update=said_nothing) for one in self.answers)})


class Shard(StrictModel):
    """Consecutive items of one suite with the answers of one target."""

    results: tuple[ItemResult, ...]


class Bounds(StrictModel):
    """Interval that covers the true value with the probability ``level``."""

    low: float
    high: float
    level: float
    method: Method


class Summary(StrictModel):
    """Scores of one target on one suite."""

    suite: str
    target: str
    mean: float
    interval: Bounds | None
    """null: the suite has a single group, whose spread nobody knows."""
    items: int
    clusters: int
    """Groups, and items without one."""
    answers: int
    invalid: int
    """Answers that could not be read or judged; they are part of the mean, with a score of 0."""
    tokens_mean: float
    """Mean length of an answer in tokens."""
    finish_reasons: dict[str, int]
    perplexity: float | None = None


class PairResult(StrictModel):
    """Paired comparison of two targets on one suite."""

    suite: str
    first: str
    second: str
    gain: float
    """Mean amount by which the second is better than the first, whichever direction is better."""
    interval: Bounds
    p: float
    """Probability of a difference at least as large, were there none; two-sided."""
    test: Test
    better: int
    """Items on which the second is better."""
    worse: int
    sees: float | None
    """Smallest true difference that this comparison finds with a power of 0.8; null: no two scores differ."""


class GateRecord(StrictModel):
    """Decisions of a training job's gates, which rest on a run."""

    gates: tuple[GateEvidence, ...]


class RunResult(StrictModel):
    """Result of a run."""

    id: str
    summaries: tuple[Summary, ...]
    comparisons: tuple[PairResult, ...]
    finished_at: float
    """Unix seconds."""
