"""FLOPs of single HLO instructions: dots, convolutions, library calls, and kernels that state their FLOPs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import numpy as np

from jaxpar.analysis.hlo.parser import ArrayType, Computation, Instruction
from jaxpar.errors import AuditError
from jaxpar.utils.scope_facts import matmul_flops_in

_LIBRARY_MATMULS = ("__cublas$gemm", "__cublas$lt$matmul")
# Custom calls of the compilers that compute nothing worth counting.
_BOOKKEEPING = (
    "AllocateBuffer|AssumeGatherIndicesInBound|AsyncCollective|ConcatBitcast|TopK|MoveTo|PinTo|"
    "annotate_device_placement|xla_ffi_python|xla_python|cu_threefry|SliceId|ZeroCrop"
)

_CUDNN = "__cudnn$fmha"
"""cuDNN's attention."""
# Matmuls of attention kernels, by the first of these words in the kernel's name.
_MATMULS = {"fwd": 2, "forward": 2, "dq": 3, "dkv": 4, "preprocess": 0, "backward": 7}


def matmul_flops(instruction: Instruction, where: Computation) -> int:
    """Returns the FLOPs (2 × multiply-adds) of a ``dot``, a ``convolution`` or a library's matmul call; 0 for others.

    A convolution counts only the window positions that fall on data: TPU compilers print batched matmuls as
    convolutions whose windows are mostly in the padding.

    Args:
      instruction: any instruction.
      where: the computation that contains it.

    Raises:
      AuditError: a convolution or a library call does not state which dims it multiplies.
    """
    out = instruction.types[0] if instruction.types else None
    if out is not None and instruction.opcode in ("dot", "scaled-dot"):
        return _dot(out, where.inputs(instruction)[0].types[0], instruction.attribute("lhs_contracting_dims"))
    if out is not None and instruction.opcode == "convolution":
        lhs, rhs = (source.types[0] for source in where.inputs(instruction)[:2])
        return _convolution(instruction, out, lhs, rhs)
    if out is not None and target(instruction).startswith(_LIBRARY_MATMULS):
        config = instruction.attribute("backend_config") or ""
        found = re.search(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]', config)
        if found is None:
            raise AuditError(
                f"{instruction.name}: the call of {target(instruction)} does not specify its contracting dims."
            )
        return _dot(out, where.inputs(instruction)[0].types[0], found[1])
    return 0


def is_grouped_matmul(instruction: Instruction) -> bool:
    """Whether an instruction is the TPU compiler's kernel of a ``jax.lax.ragged_dot`` or of one of its gradients."""
    kernel = target(instruction) == "tpu_custom_call"
    return kernel and "ragged_dot_tiling" in (instruction.attribute("frontend_attributes") or "")


def target(instruction: Instruction) -> str:
    """Returns the target of a custom call; empty for other instructions."""
    return (instruction.attribute("custom_call_target") or "").strip('"')


def kernel_flops(instruction: Instruction) -> int | None:
    """Returns the FLOPs of a custom kernel; ``None`` if the kernel does not state them.

    The result is 0 for instructions that are not kernels, and for calls that :func:`matmul_flops` counts.
    """
    name = target(instruction)
    if not name or name.startswith(_LIBRARY_MATMULS) or re.match(_BOOKKEEPING, name):
        return 0
    if instruction.op_name.endswith("ragged-dot-metadata"):  # lists the tiles of a grouped matmul
        return 0
    config = instruction.attribute("backend_config") or ""
    found = re.search(r'"cost_estimate"\s*:\s*\{[^}]*"flops"\s*:\s*"?(\d+)', config.replace("\\", ""))
    return int(found[1]) if found else _stated_by_scope(instruction)


def _stated_by_scope(instruction: Instruction) -> int | None:
    """Returns the FLOPs of an attention kernel whose caller states the cost of one of its matmuls in a scope's name.

    The forward kernel has two matmuls (scores, output). The gradient kernels also recompute the scores: the kernel for
    queries has three matmuls, for keys and values four, for both seven. cuDNN's single gradient kernel has five.
    """
    stated = matmul_flops_in(instruction.op_name)
    if stated is not None and target(instruction).startswith(_CUDNN):
        forward, gradient = stated
        return 5 * gradient if target(instruction).endswith("Backward") else 2 * forward
    name = instruction.op_name.rpartition("/pallas_call")[0].rpartition("/")[2]
    kernel = re.search("|".join(_MATMULS), name)
    if stated is None or kernel is None:
        return None
    forward, gradient = stated
    return _MATMULS[kernel[0]] * (forward if kernel[0] in ("fwd", "forward") else gradient)


def _dot(out: ArrayType, lhs: ArrayType, contracting: str | None) -> int:
    dims = [int(n) for n in re.findall(r"\d+", contracting or "")]
    return 2 * out.size * math.prod(lhs.shape[i] for i in dims)


def _convolution(instruction: Instruction, out: ArrayType, lhs: ArrayType, rhs: ArrayType) -> int:
    found = re.fullmatch(r"(\w+)_(\w+)->(\w+)", instruction.attribute("dim_labels") or "")
    if found is None:
        raise AuditError(f"{instruction.name}: the convolution does not specify its dims (dim_labels).")
    lhs_at, rhs_at, out_at = ({label: i for i, label in enumerate(text)} for text in found.groups())
    texts = re.findall(r"(\w+)=([\w\-]+)", instruction.attribute("window") or "")
    window = {name: value.split("x") for name, value in texts}
    taps = 1
    for label in (label for label in lhs_at if label.isdigit()):
        one = {name: values[int(label)] for name, values in window.items() if int(label) < len(values)}
        taps *= _taps(lhs.shape[lhs_at[label]], out.shape[out_at[label]], rhs.shape[rhs_at[label]], one)
    return 2 * out.shape[out_at["b"]] * out.shape[out_at["f"]] * rhs.shape[rhs_at["i"]] * taps


def _taps(size: int, out: int, kernel: int, window: Mapping[str, str]) -> int:
    """Count the (output position, kernel position) pairs of one spatial dim that meet an input element."""
    low = int(window.get("pad", "0_0").split("_")[0])
    stride, lhs_dilate, rhs_dilate = (int(window.get(name, "1")) for name in ("stride", "lhs_dilate", "rhs_dilate"))
    last = (size - 1) * lhs_dilate
    outputs = np.arange(out) * stride
    count = 0
    for k in range(kernel):
        offset = k * rhs_dilate - low
        if lhs_dilate == 1:
            # A closed form, as `out` and `kernel` can be long: output positions o with 0 <= o * stride + offset <=
            # last.
            first, final = max(0, -(offset // stride)), min(out - 1, (last - offset) // stride)
            count += max(0, final - first + 1)
        else:
            spots = outputs + offset
            count += int(((spots >= 0) & (spots <= last) & (spots % lhs_dilate == 0)).sum())
    return count
