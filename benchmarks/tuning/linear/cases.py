"""Linear layers of the 4B model as the sweeps launch them: weights, what surrounds a product, and the report."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.gpu.linear.skinny_configs import Kind, SkinnyConfig

NOT_CUTS = ("torch.mm", "apart")
"""Variants that are no cuts of skinny_linear."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of one linear layer of the 4B model."""

    name: str
    outputs: int
    inputs: int
    swiglu: bool = False
    norm: bool = False
    residual: bool = False


SHAPES = (
    Shape("gate_up", 18432, 2560, swiglu=True, norm=True),
    Shape("down", 2560, 9216, residual=True),
    Shape("in_proj", 12352, 2560, norm=True),
    Shape("out_proj", 2560, 4096, residual=True),
    Shape("head", 248320, 2560, norm=True),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One variant of one layer."""

    shape: Shape
    kind: Kind
    rows: int
    config: SkinnyConfig

    @property
    def key(self) -> dict[str, Any]:
        return {"layer": self.shape.name, "kind": self.kind, "rows": self.rows, **asdict(self.config)}


def weight_of(shape: Shape, kind: Kind, device: torch.device, dense: Tensor | None = None) -> Any:
    """A weight on the device: the given one quantized, or one of the right shape and any contents."""
    from kernels.quantize import Fp8Weight, Int4Weight, quantize_fp8, quantize_int4

    outputs, inputs = shape.outputs, shape.inputs
    if dense is not None:
        return dense if kind == "none" else quantize_fp8(dense) if kind == "fp8" else quantize_int4(dense)
    if kind == "none":
        return torch.empty(outputs, inputs, dtype=torch.bfloat16, device=device)
    if kind == "fp8":
        values = torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn, device=device)
        return Fp8Weight(values, torch.empty(outputs, device=device))
    groups = inputs // 128
    return Int4Weight(
        torch.empty(groups, outputs, 32, dtype=torch.int16, device=device),
        torch.empty(groups, outputs, dtype=torch.bfloat16, device=device),
        torch.empty(groups, outputs, dtype=torch.uint8, device=device),
    )


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Inputs of a layer's product besides its weight."""

    x: Tensor
    gain: Tensor
    scaled: Any
    """x made ready for its norm, as the product before does it."""
    residual: Tensor
    scratch: Tensor
    """The residual stream that a product adds to: set it to ``residual`` before a result is looked at."""
    ahead: Any
    """The norm that reads that stream next."""
    workspace: Any

    @classmethod
    def make(cls, shape: Shape, rows: int, device: torch.device) -> Surroundings:
        from kernels.gpu.linear.skinny import Norm, Scaled, SplitWorkspace

        make = torch.randn if device.type == "cuda" else torch.empty
        width = shape.outputs // (2 if shape.swiglu else 1)
        x = make(rows, shape.inputs, device=device).to(torch.bfloat16)
        gain = make(shape.inputs, device=device).mul(0.1).add(1) if device.type == "cuda" else make(shape.inputs)
        # As many parts as a product of 2,560 outputs in tiles of 64 leaves, or of 2 for one row.
        parts = 1280 if rows == 1 else 40
        squares = (x.float().square().sum(1) / parts).expand(parts, rows).contiguous()
        residual = make(rows, width, device=device).to(torch.bfloat16)
        return cls(
            x,
            gain,
            Scaled((x.float() * gain).to(torch.bfloat16), squares, 1e-6),
            residual,
            residual.clone(),
            Norm(torch.ones(width, device=device), 1e-6),
            SplitWorkspace.allocate(device),
        )

    def launch(self, case: Case, weight: Any, *, pdl: bool = True) -> Tensor:
        """One product as the engine calls it."""
        from kernels.gpu.linear.skinny import skinny_add, skinny_linear

        if case.shape.residual:
            skinny_add(
                self.scratch, self.x, weight, ahead=self.ahead, config=case.config, workspace=self.workspace, pdl=pdl
            )
            return self.scratch
        return skinny_linear(
            self.scaled if case.shape.norm else self.x,
            weight,
            swiglu=case.shape.swiglu,
            config=case.config,
            workspace=self.workspace,
            pdl=pdl,
        )


def reference(case: Case, around: Surroundings, dense: Tensor) -> Tensor:
    """The layer in float32 on the decoded weight."""
    y = around.x.float()
    if case.shape.norm:
        y = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * around.gain
    y = y @ dense.float().t() if dense.numel() < 2e8 else (y.to(dense.dtype) @ dense.t()).float()
    if case.shape.swiglu:
        gate, up = y.chunk(2, -1)
        y = gate * gate.sigmoid() * up
    return y + around.residual.float() if case.shape.residual else y


def error_bound(row: dict[str, Any]) -> float:
    """The largest error that is rounding. Two variants of float8 round x to float8 too."""
    return 0.06 if row["kind"] == "fp8" and row["variant"] in ("tma", "apart") else 0.03


def report(rows: list[dict[str, Any]], best: int) -> None:
    """The best variants of each layer, kind and number of rows."""
    groups: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for row in rows:
        if "us" in row:
            groups.setdefault((row["kind"], row["layer"], row["rows"]), []).append(row)
    for (kind, layer, count), members in sorted(groups.items()):
        for row in sorted(members, key=lambda r: r["us"])[:best] + [r for r in members if r["variant"] in NOT_CUTS]:
            wrong = "  WRONG" if row.get("error", 0) > error_bound(row) else ""
            cut = " ".join(
                f"{key}={row[key]}"
                for key in (
                    "variant",
                    "block_n",
                    "block_k",
                    "warps",
                    "stages",
                    "splits",
                    "prefetch",
                    "stagger",
                )
                if key in row
            )
            alone = f"  ({row['us_alone']:.2f} us if none starts early)" if "us_alone" in row else ""
            speed = f"{row['us']:8.2f} us {row.get('tb_s', 0):5.2f} TB/s"
            print(f"{kind:<5}{layer:<9} M={count:<3}{speed}  {cut}{alone}{wrong}")
    for row in rows:
        if "failed" in row or row.get("error", 0) > error_bound(row):
            print("bad:", {key: value for key, value in row.items() if key != "us"})
