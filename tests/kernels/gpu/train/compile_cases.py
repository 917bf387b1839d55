"""Launches of the training kernels at the 4B shape, for tests.kernels.hopper."""

from __future__ import annotations

import torch

from kernels.divergence import Divergence
from kernels.gpu.delta.shape import DeltaShape
from kernels.gpu.train.activations import swiglu_backward
from kernels.gpu.train.attention import AttentionShape, attention_forward
from kernels.gpu.train.attention_backward import attention_backward, gate_backward
from kernels.gpu.train.conv1d import conv_backward
from kernels.gpu.train.divergence import divergence_rows
from kernels.gpu.train.documents import Documents
from kernels.gpu.train.gated_delta import FEW, MANY, gated_delta_forward
from kernels.gpu.train.gated_delta_backward import scan_backward
from kernels.gpu.train.gated_delta_gradients import gated_delta_gradients
from kernels.gpu.train.gated_norm import gated_norm_backward
from kernels.gpu.train.head import score_rows
from kernels.gpu.train.qk_rope import qk_norm_rope, qk_norm_rope_backward
from kernels.gpu.train.rms_norm import rms_norm_backward
from kernels.rope import Rotation, inverse_frequencies
from tests.kernels.gpu.delta.support import mixer


def launches() -> None:
    documents = Documents.build([64], "cpu")
    m = mixer(64, "cpu", key_heads=16, heads=32, key_dim=128, value_dim=128, dtype=torch.bfloat16)
    shape = DeltaShape(16, 32, 128, 128)
    mixed, grad = m.projected[:, : m.conv_dim].contiguous(), torch.empty_like(m.projected)
    do = torch.zeros(64, shape.value_size, dtype=torch.bfloat16)
    for cut in (FEW, MANY):
        _, tiles, trace = gated_delta_forward(mixed, m.projected, m.negative_a, m.dt_bias, shape, documents, cut=cut)
        scans = scan_backward(mixed, m.projected, tiles, do, shape, documents, cut=cut)
    parameters = (m.negative_a, m.dt_bias, trace, do, *scans)
    gated_delta_gradients(mixed, m.projected, *parameters, shape, documents, projected_grad=grad)
    conv_backward(m.projected, m.conv, mixed, documents.segments, out=grad)
    z = slice(m.conv_dim, m.conv_dim + shape.value_size)
    gated_norm_backward(do, m.projected[:, z], m.norm, 1e-6, do, dgate=grad[:, z])

    heads = AttentionShape(16, 4, 256)
    projected = torch.zeros(64, heads.value_offset + 1024, dtype=torch.bfloat16)
    weight, rotation = torch.ones(20, 256), Rotation(inverse_frequencies(64, 1e7))
    rope = (projected, weight, 1e-6, rotation, documents.positions)
    rotated = qk_norm_rope(*rope, offset=heads.query_size)
    out, _, normalizer = attention_forward(rotated, projected, heads, documents)
    do, _, products = gate_backward(out, projected, out, heads, projected_grad=projected)
    rest = (normalizer, products, heads, documents)
    drotated = attention_backward(rotated, projected, do, *rest, projected_grad=projected)
    qk_norm_rope_backward(*rope, drotated, offset=heads.query_size, out=projected)

    x = torch.zeros(64, 2560, dtype=torch.bfloat16)
    rms_norm_backward(x, torch.ones(2560), 1e-6, x, x)
    gate_up = torch.zeros(64, 18432, dtype=torch.bfloat16)
    swiglu_backward(gate_up, gate_up[:, :9216])
    logits = torch.zeros(2, 248320, dtype=torch.bfloat16)
    targets = torch.zeros(2, dtype=torch.int64)
    for slope in (False, True):
        score_rows(logits, targets, 1.0, torch.zeros(2), torch.zeros(2, dtype=torch.bool), slope=slope)
    into = Divergence(torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.int8))
    for beta in (0.0, 0.5, 1.0):
        for slope in (False, True):
            divergence_rows(logits, logits.clone(), into, beta=beta, temperature=1.0, slope=slope)
