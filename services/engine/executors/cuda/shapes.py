"""Step shapes that are captured as CUDA graphs, and how each is launched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kernels.gpu.attention.decode import DecodeWorkspace, decode_splits
from kernels.gpu.segments import TILE
from services.engine.executors.cuda.buffers import StepShape
from services.engine.models.device_batch import DecodeAttention, DeviceCache
from services.engine.models.interface import CausalLM
from services.engine.scheduler.step_plan import MOST_VERIFYING

_DECODES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
_PREFILL_TOKENS = (64, 128, 256, 512, 1024, 1536, 2048)
"""Prompt tokens of captured steps. Up to the last, a step's launches may take the host longer than its kernels take the
device: about 27 ms, 50 with adapters, beside 75 tokens a millisecond."""
_MIXED_DECODES = (8, 32, 64, 128, 256)
_MIXED_TOKENS = (128, 512, 1024, 2048)
"""Prompt tokens of captured mixed steps. With adapters the launches of 2,048 tokens took the host 57 ms beside an H200
that needed 38; 3,840, the most that a step with decodes holds by default, take that 63."""
_APART_TOKENS = (1024, 1536, 2048, 2560, 3072, 3840)
"""The same where decodes are computed apart from prompts: with twice as many launches, 3,840 tokens took the host 80 ms
beside an H200 that needs half of that."""
_APART_SEGMENTS = 64
_INVARIANT_BATCH = 64
"""Decode attention is cut as for this batch size, or a larger one, where a row's bits must not depend on the batch."""
INVARIANT_ALIGNMENT = TILE
"""Prefill kernels compute tiles of a segment: cut at their multiples, a prompt is computed the same in any chunks."""
_SEGMENTS = ((2, 4), (16, 24))
"""Prompts that captured prefills are for and segments that they hold, a prompt with snapshots being several: one may
have three, two one each, of 16 every other one. More prompts together are long enough to run uncaptured. The segments
between the two numbers are not free, as each may need a tile of its own: where it is padding, the layers launch some
two hundred programs for it that end at once."""


_DRAFT_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Draft tokens of a chunk whose steps are captured and timed; also the most that an engine has."""


def decode_bucket(decodes: int) -> int:
    """The smallest captured batch size that holds this many; beyond the largest, a multiple of 64."""
    return next((bucket for bucket in _DECODES if bucket >= decodes), -(-decodes // 64) * 64)


def decode_buckets(max_num_seqs: int) -> list[int]:
    """All buckets of batches up to this many, ascending."""
    return sorted({decode_bucket(count) for count in range(1, max_num_seqs + 1)})


def draft_counts(most: int) -> list[int]:
    """Numbers of draft tokens of a chunk whose steps are captured and timed, ascending, of an engine with so many at
    most; none: []."""
    return [count for count in _DRAFT_COUNTS if count < most] + [most] * (most > 0)


def draft_group(rows: int, most: int) -> int:
    """Rows of a decode in a step whose longest one has so many, of an engine with ``most`` draft tokens."""
    return next((1 + count for count in (0, *draft_counts(most)) if 1 + count >= rows), rows)


def verified_rows(max_num_seqs: int, draft_tokens: int) -> int:
    """Most rows of a step with draft tokens, padding included."""
    return decode_bucket(min(max_num_seqs, MOST_VERIFYING)) * (1 + draft_tokens)


def most_decode_rows(max_num_seqs: int, draft_tokens: int) -> int:
    """Most rows of a step that are decodes, padding included."""
    most = decode_bucket(max_num_seqs)
    return max(most, verified_rows(max_num_seqs, draft_tokens)) if draft_tokens else most


def decode_attention(
    model: CausalLM, cache: DeviceCache, max_num_seqs: int, *, draft_tokens: int, batch_invariant: bool
) -> dict[int, DecodeAttention]:
    """Decode attention by the number of rows, in buckets. Those with as many splits share a workspace."""
    config, device, kernels = model.config, model.device, model.kernel_configs()
    buckets = decode_buckets(most_decode_rows(max_num_seqs, draft_tokens))
    # An invariant row is cut as in a large batch whatever batch it is in.
    alike = max(buckets[-1], _INVARIANT_BATCH)
    splits = {
        bucket: decode_splits(alike if batch_invariant else bucket, config.num_kv_heads, kernels.device)
        for bucket in buckets
    }
    workspaces = {
        count: DecodeWorkspace.allocate(
            max(bucket for bucket in buckets if splits[bucket] == count),
            config.num_heads,
            config.num_kv_heads,
            count,
            config.head_dim,
            device,
        )
        for count in set(splits.values())
    }
    chosen = kernels.decode(cache.pages[0], alike) if batch_invariant and cache.pages else None
    return {bucket: DecodeAttention(splits[bucket], workspaces[splits[bucket]], chosen) for bucket in buckets}


def captured_shapes(
    largest_batch: int,
    max_num_seqs: int,
    token_budget: int,
    mixed_tokens: int,
    *,
    draft_tokens: int = 0,
    apart: int = 0,
) -> list[StepShape]:
    """The shapes to capture, in the order of capture: the largest first, whose memory the others then share.

    Args:
        largest_batch: decodes; 0: none.
        mixed_tokens: prefill tokens of a step that also decodes.
        draft_tokens: most of a chunk.
        apart: of DeviceForward.prompts_apart.
    """
    if largest_batch == 0:
        return []
    most = min(decode_bucket(max_num_seqs), largest_batch)
    shapes = [StepShape(bucket, bucket) for bucket in _DECODES if bucket <= most]
    prefills = [tokens for tokens in _PREFILL_TOKENS if tokens <= token_budget]
    held = sorted({min(prompts, max_num_seqs) + segments - prompts for prompts, segments in _SEGMENTS})
    shapes += [_prefill(0, tokens, segments) for tokens in prefills for segments in held]
    mixed = [(tokens, held[-1]) for tokens in _sizes(_MIXED_TOKENS, mixed_tokens) if apart == 0 or tokens < apart]
    if apart:
        mixed += [(tokens, _APART_SEGMENTS) for tokens in _sizes(_APART_TOKENS, mixed_tokens) if tokens >= apart]
    shapes += [
        _prefill(bucket, tokens, segments)
        for tokens, segments in mixed
        for bucket in _MIXED_DECODES
        if bucket <= most and tokens <= token_budget
    ]
    shapes += [
        StepShape.of_groups(size, 1 + count) for size in draft_buckets(most) for count in draft_counts(draft_tokens)
    ]
    return sorted(shapes, key=lambda shape: -shape.rows)


def draft_buckets(max_num_seqs: int) -> list[int]:
    """Numbers of sequences of steps with draft tokens that are captured, ascending."""
    return decode_buckets(min(max_num_seqs, MOST_VERIFYING))


def smallest(shapes: Iterable[StepShape], wanted: StepShape) -> StepShape | None:
    """The captured shape with the least padding that holds a step; None: none does."""
    fitting = [shape for shape in shapes if shape.holds(wanted)]
    return min(fitting, key=lambda shape: (shape.rows, shape.decodes, shape.segments), default=None)


def _prefill(decodes: int, tokens: int, segments: int) -> StepShape:
    return StepShape(decodes, decodes + tokens, segments, tokens // TILE + segments)


def _sizes(sizes: Sequence[int], most: int) -> list[int]:
    """Numbers of prompt tokens to capture beside decodes, ascending."""
    return sorted({size for each in sizes if (size := min(each, most)) > 0 and size % TILE == 0})
