"""Estimate of the bytes that a job needs beside the frozen weights, made before it allocates anything.

The activation figures count what is kept from forward to backward (tests compare them with what really is), plus
working space: an upper bound, not a prediction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kernels.gated_delta import CHUNK
from services.common.errors import DoesNotFit
from services.engine.models.config import ModelConfig
from services.engine.models.cuda_graphs import captured_rows
from services.engine.models.interface import Recompute

MASTER_BYTES = 16
"""A trained number: float32 master, gradient, and AdamW's two moments."""
LOGIT_ROWS = 256
"""Rows whose logits exist at once in plain torch."""
FUSED_LOGIT_ROWS = 384
"""The same on a GPU (kernels.gpu.train.head), in the model's dtype."""
TEACHER_LOGIT_ROWS = 384
"""Rows of a teacher's logits that exist at once on a GPU (kernels.gpu.train.divergence)."""
TEACHER_LOGIT_COPIES = 8
"""Float32 tensors as wide as the vocabulary that a comparison adds in plain torch (kernels.divergence)."""
MARGIN = 1.1
"""Factor for what is not counted."""
_TILE = 64
"""Tokens between two states that the gated delta rule keeps on a GPU (kernels.gpu.segments)."""
_WAYS_OUT: tuple[Recompute, ...] = ("selective", "full")


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """Bytes of one job."""

    adapter: int
    """Masters, gradients and optimizer."""
    activations: int
    """Kept from forward to backward, at their peak."""
    logits: int
    """One tile of the head's output with what is made of it."""
    teacher: int = 0
    """Bytes that a teacher needs beside its weights: its adapter, its activations, its tile of logits."""
    captured: int = 0
    """Bytes among these in which steps compute that are captured as CUDA graphs."""

    @property
    def total(self) -> int:
        return self.adapter + self.activations + self.logits + self.teacher


@dataclass(frozen=True, slots=True)
class TeacherWork:
    """A model that reads a job's microbatches without gradient.

    Raises:
        ValueError: a negative number.
    """

    config: ModelConfig
    adapter_numbers: int = 0
    """Numbers of its adapter, if it has one."""

    def __post_init__(self) -> None:
        if self.adapter_numbers < 0:
            raise ValueError(f"an adapter has no {self.adapter_numbers} numbers")


@dataclass(frozen=True, slots=True)
class Workload:
    """Properties of a job that its memory depends on.

    Raises:
        ValueError: a number below 1.
    """

    adapter_numbers: int
    rank: int
    tokens: int
    """Inputs of the largest microbatch."""
    itemsize: int
    """Bytes of an activation."""
    recompute: Recompute
    fused: bool
    """True on a GPU, where the forward has a backward of its own; otherwise torch's autograd computes it."""
    teacher: TeacherWork | None = None
    number_bytes: int = MASTER_BYTES
    """Bytes that a trained number takes beside what a forward on a GPU adds."""

    def __post_init__(self) -> None:
        if min(self.adapter_numbers, self.rank, self.tokens, self.itemsize) < 1:
            raise ValueError(f"a job has at least one of everything: {self}")


def estimate(config: ModelConfig, work: Workload) -> TrainingMemory:
    """Bytes for a job. On a GPU a microbatch is captured with as many rows as there are captured steps for."""
    layers = range(config.num_layers)
    rows = captured_rows(work.tokens) if work.fused else None
    if rows is not None:
        work = replace(work, tokens=rows)
    if work.fused:
        kept = sum(_fused_bytes(config, layer, work, work.recompute) for layer in layers)
        working = max(_fused_working(config, layer, work) for layer in layers)
        copies = 2 * work.itemsize  # of the adapter, and of the final hidden states' gradient
        final = config.hidden_size * 4 * work.itemsize
        logits = min(work.tokens, FUSED_LOGIT_ROWS) * config.vocab_size * work.itemsize
        logits += 3 * work.tokens * config.hidden_size * work.itemsize
    else:
        whole = [_plain_bytes(config, layer, work) for layer in layers]
        kept, working = sum(whole), max(whole)
        # The backward of a layer works in about as much again as its activations are.
        if work.recompute == "full":
            kept = config.num_layers * config.hidden_size * work.itemsize + max(whole)
        elif work.recompute == "selective":
            mlp = config.mlp_numbers().plain * work.itemsize
            kept += config.num_layers * (config.hidden_size * work.itemsize - mlp) + mlp
        copies = 0
        final = config.hidden_size * (2 * work.itemsize + 8)
        logits = min(work.tokens, LOGIT_ROWS) * config.vocab_size * 4 * 3
    activations = int(MARGIN * work.tokens * (kept + working + final))
    teacher = (0, 0) if work.teacher is None else _teacher_bytes(work.teacher, work)
    return TrainingMemory(
        adapter=work.adapter_numbers * (work.number_bytes + copies),
        activations=activations,
        logits=logits,
        teacher=sum(teacher),
        # One after the other in the same memory.
        captured=0 if rows is None else max(activations, teacher[0]),
    )


@dataclass(frozen=True, slots=True)
class DrafterWork:
    """Properties of a job that trains a drafter.

    Raises:
        ValueError: a number below 1.
    """

    numbers: int
    """Of all layers."""
    tokens: int
    """Inputs of the largest microbatch."""
    itemsize: int
    """Bytes of an activation."""
    fused: bool
    """True on a GPU, where the model reads with kernels; the layer itself is in plain torch."""
    depth: int
    """Tokens that are proposed in a row."""
    target: TeacherWork
    layers: int = 1
    """Of the drafter."""

    def __post_init__(self) -> None:
        if min(self.numbers, self.tokens, self.itemsize, self.depth, self.layers) < 1:
            raise ValueError(f"a job has at least one of everything: {self}")


def estimate_drafter(config: ModelConfig, work: DrafterWork) -> TrainingMemory:
    """Bytes for a job that trains a drafter: the layer as one of the model's, once for each token proposed in a row."""
    rows = captured_rows(work.tokens) if work.fused else None
    read = Workload(
        adapter_numbers=1,
        rank=1,
        tokens=work.tokens if rows is None else rows,
        itemsize=work.itemsize,
        recompute="none",
        fused=work.fused,
    )
    # It is one of full attention.
    alike = [one for one in range(config.num_layers) if "self_attn.q_proj" in config.linear_shapes(one)]
    layer = max(_plain_bytes(config, one, read) for one in alike or range(config.num_layers))
    # Of the embedding, both norms and the product of the two; of the divergence the slope, and the rows it is of.
    around = config.hidden_size * (6 * work.itemsize + 16)
    # A layer's backward works in about as much again as its activations are. The masks are a byte a pair of tokens.
    activations = int(MARGIN * work.tokens * (work.layers * (work.depth + 1) * layer + work.depth * around))
    activations += work.tokens**2 * (work.depth + 1) * work.layers
    if work.fused:
        logits = 2 * min(work.tokens, TEACHER_LOGIT_ROWS) * config.vocab_size * work.itemsize
    else:
        logits = min(work.tokens, LOGIT_ROWS) * config.vocab_size * 4 * TEACHER_LOGIT_COPIES
    teacher = _teacher_bytes(work.target, read)
    return TrainingMemory(
        # Beside the masters the layer in the model's dtype, and its gradient there.
        adapter=work.numbers * (MASTER_BYTES + 2 * work.itemsize),
        activations=activations,
        logits=logits,
        teacher=sum(teacher),
        captured=0 if rows is None else teacher[0],
    )


def check_drafter_fits(config: ModelConfig, work: DrafterWork, budget: int) -> TrainingMemory:
    """The estimate, if it is within ``budget`` bytes. Raises DoesNotFit."""
    memory = estimate_drafter(config, work)
    if memory.total <= budget:
        return memory
    raise DoesNotFit(
        f"the job needs {mib(memory.total)} (the layer, gradients and optimizer {mib(memory.adapter)}, activations of "
        f"{work.tokens} tokens {mib(memory.activations)}, logits {mib(memory.logits)}, the model's forward "
        f"{mib(memory.teacher)}), and the memory plan leaves {mib(budget)} for training: set a smaller "
        "max_tokens_per_microbatch, depth or block, or give the engine more memory for training "
        "(TEMPER_TRAIN_MEMORY_BYTES)",
        param="max_tokens_per_microbatch",
    )


def _teacher_bytes(teacher: TeacherWork, work: Workload) -> tuple[int, int]:
    """Activations, and the rest. A forward without gradient is one layer at a time; what the whole of it leaves is its
    final hidden states."""
    config, layers = teacher.config, range(teacher.config.num_layers)
    final = config.hidden_size * 4 * work.itemsize
    if work.fused:
        again = replace(work, recompute="none")
        layer = max(_fused_bytes(config, one, again, "none") + _fused_working(config, one, again) for one in layers)
        logits = min(work.tokens, TEACHER_LOGIT_ROWS) * config.vocab_size * work.itemsize
    else:
        layer = max(_plain_bytes(config, one, work) for one in layers)
        logits = min(work.tokens, LOGIT_ROWS) * config.vocab_size * 4 * TEACHER_LOGIT_COPIES
    # Masters; beside them, on a GPU, room for gradients that nobody asks for and the factors as the model reads them.
    adapter = teacher.adapter_numbers * (8 + work.itemsize if work.fused else 4)
    return int(MARGIN * work.tokens * (layer + final)), adapter + logits


def _plain_bytes(config: ModelConfig, layer: int, work: Workload) -> int:
    """Bytes a token that one layer keeps, counted from its inputs to autograd: the numbers of ``narrow`` are of the
    model's dtype, those of ``wide`` float32."""
    narrow = config.mlp_numbers().plain + len(config.linear_shapes(layer)) * work.rank
    mixer = config.training_numbers(layer, chunk=CHUNK, tile=_TILE).plain
    return (narrow + mixer[0]) * work.itemsize + (4 * config.hidden_size + mixer[1]) * 4


def _projection(config: ModelConfig, layer: int) -> int:
    """Width of a mixer's first projection."""
    return sum(config.linear_shapes(layer)[module][0] for module in config.linear_groups(layer)["in"])


def _fused_bytes(config: ModelConfig, layer: int, work: Workload, recompute: Recompute) -> int:
    """Bytes a token that one layer keeps on a GPU."""
    narrow, wide = config.hidden_size, 0
    if recompute != "full":
        narrow += config.hidden_size + _projection(config, layer)
    mixer = config.training_numbers(layer, chunk=CHUNK, tile=_TILE)
    if recompute == "none" or (recompute == "selective" and mixer.selective_keeps_inside):
        narrow, wide = narrow + mixer.inside[0], wide + mixer.inside[1]
    if recompute == "none":
        narrow += config.mlp_numbers().inside
    return narrow * work.itemsize + wide * 4


def _fused_working(config: ModelConfig, layer: int, work: Workload) -> int:
    """Bytes a token that one layer's backward works in on a GPU, what it computes again included."""
    again = _fused_bytes(config, layer, work, "none") - _fused_bytes(config, layer, work, work.recompute)
    mlp = config.mlp_numbers().backward
    numbers = config.training_numbers(layer, chunk=CHUNK, tile=_TILE)
    narrow, wide = numbers.inside
    mixer = 2 * _projection(config, layer) + narrow + numbers.backward
    return again + max(mlp, mixer) * work.itemsize + 4 * wide + 2 * config.hidden_size * work.itemsize


def check_fits(config: ModelConfig, work: Workload, budget: int) -> TrainingMemory:
    """The estimate, if it is within ``budget`` bytes.

    Raises:
        DoesNotFit: it is not; the message has the numbers and what would fit.
    """
    memory = estimate(config, work)
    if memory.total <= budget:
        return memory
    fitting = [kind for kind in _WAYS_OUT if estimate(config, replace(work, recompute=kind)).total <= budget]
    if work.recompute != "full" and fitting:
        way_out = f'set recompute to "{fitting[0]}"'
    else:
        low, high = 0, work.tokens
        while low < high:
            middle = (low + high + 1) // 2
            fits = estimate(config, replace(work, tokens=middle, recompute="full")).total <= budget
            low, high = (middle, high) if fits else (low, middle - 1)
        if low >= 1:
            way_out = f'set max_tokens_per_microbatch to at most {low} with recompute "full"'
        else:
            way_out = (
                "choose a lower lora.rank or fewer lora.target_modules, or give the engine more memory for training"
            )
    teacher = f", the teacher's forward {mib(memory.teacher)}" if memory.teacher else ""
    raise DoesNotFit(
        f"the job needs {mib(memory.total)} (adapter, gradients and optimizer {mib(memory.adapter)}, activations of "
        f"{work.tokens} tokens {mib(memory.activations)}, logits {mib(memory.logits)}{teacher}), and the memory plan "
        f"leaves {mib(budget)} for training: {way_out}",
        param="max_tokens_per_microbatch",
    )


def mib(count: int) -> str:
    """Bytes in words for users."""
    return f"{count / 2**20:.1f} MiB"
