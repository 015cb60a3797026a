"""Weight-only quantization: 8 bits a weight and one scale for each output channel.

    declared = quantize.declare(declared, "int8")       # the same model with quantized weights
    values, scale = quantize.quantize(weight, 1, "int8", np.dtype("float32"))

What is quantized: the weights of the linear layers of stacked blocks (`ColumnLinear`, `RowLinear`, `SplitInputLinear`),
which are nearly all bytes of every model here; modulation layers among them, a quarter of FLUX.1 and a third of
Qwen-Image. What is not: norms, biases and tables, which are small and are not multiplied as matrices; embeddings, of
which few rows are read; and what stands before and after the blocks, whose errors no later block evens out.

The scale is the largest magnitude of the channel over the largest stored value, rounded to its dtype first and to at
most 16 significant bits: its product with any stored value is then exact in float32, so that a quantized weight that
is dequantized to float32 and quantized again comes out with the same bits. It is of the dtype of the weight. A channel
of zeros has values of zero.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Array, Float, Shaped

from shardzoo.errors import InputError
from shardzoo.zoo import layout
from shardzoo.zoo.layers import Linear
from shardzoo.zoo.layout import LAYER, Param
from shardzoo.zoo.linears import input_dims, kept, linear_layers, with_weights
from shardzoo.zoo.weights import Adapted, Quantized, Weight, declared_base

Host = Array | np.ndarray
DTYPES: Mapping[str, np.dtype] = {"int8": np.dtype(np.int8), "fp8": np.dtype(ml_dtypes.float8_e4m3fn)}
KINDS: Mapping[np.dtype, str] = {dtype: kind for kind, dtype in DTYPES.items()}
LARGEST = {"int8": 127.0, "fp8": 448.0}
VALUES, SCALE = ".values", ".scale"  # what the paths of a quantized weight's two leaves end in
_BLOCK = 1 << 20  # elements worked on at a time
_DROPPED = 0xFF  # bits of a float32 scale: 16 significant ones stay


def declare(declared: layout.Tree, kind: str) -> layout.Tree:
    """The declaration with the weights of its blocks' linear layers quantized; those that are already stay.

    Raises:
        InputError: an unknown kind; a model that has no such weights.
    """
    chosen = quantizable(declared, kind)
    if not chosen:
        raise InputError(f"quantize={kind!r}: this model has no linear layers in stacked blocks: leave it out")
    return with_weights(declared, {path: declared_weight(layer, layer.weight, kind) for path, layer in chosen.items()})


def quantizable(declared: Any, kind: str) -> dict[str, Linear]:
    """Path of the weight -> layer, of the weights that are quantized.

    Raises:
        InputError: an unknown kind.
    """
    if kind not in DTYPES:
        raise InputError(f"quantize={kind!r} is unknown: use one of {', '.join(DTYPES)}")
    return {p: layer for p, layer in linear_layers(declared).items() if LAYER in declared_base(layer.weight).names}


def declared_weight(layer: Linear, weight: Weight, kind: str) -> Weight:
    """A declared layer's weight quantized; its adapters stay as they are, and so does one that is quantized."""
    if isinstance(weight, Adapted) and isinstance(weight.base, Param):
        return Adapted(base=declared_quantized(layer, weight.base, kind), lora=weight.lora)
    return declared_quantized(layer, weight, kind) if isinstance(weight, Param) else weight


def declared_quantized(layer: Linear, weight: Param, kind: str) -> Quantized:
    """The declared values and scales of a layer's weight."""
    outputs = tuple(dim for dim in weight.names if dim not in input_dims(layer))
    values = dataclasses.replace(weight, dtype=DTYPES[kind], fixed=True)
    scale = kept(weight, outputs, dtype=scale_dtype(weight.dtype), memory="device")
    return Quantized(values=values, scale=scale)


def scale_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype of the scales of a weight: its own, unless that is too narrow for them or wider than is computed in."""
    return {1: np.dtype(ml_dtypes.bfloat16), 8: np.dtype(np.float32)}.get(dtype.itemsize, dtype)


def kind_of(declared: Any) -> str | None:
    """How the weights of a declaration are quantized: "int8", "fp8", "fp8 and int8", or None."""
    found = {KINDS[p.dtype] for path, p in layout.named(declared).items() if path.endswith(VALUES) and p.fixed}
    return " and ".join(sorted(found)) or None


def quantize(
    weight: Shaped[np.ndarray, "*out_in"], inputs: int, kind: str, dtype: np.dtype, what: str = "weight"
) -> tuple[Shaped[np.ndarray, "*out_in"], Float[np.ndarray, "*out"]]:
    """Values and scales of a weight whose last `inputs` dims are whole; `dtype` is that of the scales.

    Memory beside the result is bounded: some rows are worked on at a time.

    Raises:
        InputError: NaN or infinite weights; `what` names the weight.
    """
    cut = weight.ndim - inputs
    width = math.prod(weight.shape[cut:])
    values = np.empty(weight.shape, DTYPES[kind])
    scale = np.empty(weight.shape[:cut], dtype)
    source, target, scales = weight.reshape(-1, width), values.reshape(-1, width), scale.reshape(-1)
    step = max(1, _BLOCK // max(width, 1))
    for at in (slice(start, start + step) for start in range(0, len(source), step)):
        rows = source[at].astype(np.float32)
        scales[at] = _scales(np.abs(rows).max(axis=1, initial=0.0), kind, dtype, what)
        target[at] = at_scale(rows, scales[at], kind)
    return values, scale


def at_scale(
    weight: Shaped[np.ndarray, "*out_in"], scale: Float[np.ndarray, "*out"], kind: str
) -> Shaped[np.ndarray, "*out_in"]:
    """The stored values of finite weights whose scales are known."""
    x = np.clip(weight.astype(np.float32) / _beside(scale, weight), -LARGEST[kind], LARGEST[kind])
    return (np.rint(x) if kind == "int8" else x).astype(DTYPES[kind])


def _beside(scale: Float[Host, "*out"], weight: Shaped[Host, "*out_in"]) -> Float[Host, "..."]:
    """The scales in float32, with a dim of size 1 for each dim of the inputs."""
    return scale.astype(np.float32).reshape(*scale.shape, *[1] * (weight.ndim - scale.ndim))


def _scales(largest: Float[np.ndarray, " rows"], kind: str, dtype: np.dtype, what: str) -> Float[np.ndarray, " rows"]:
    wrong = np.flatnonzero(~np.isfinite(largest))
    if wrong.size:
        raise InputError(
            f"{what}: {wrong.size} output channels hold NaN or infinite weights, which cannot be quantized: repair the"
            " source, or convert without quantize="
        )
    exact = largest / np.float32(LARGEST[kind])
    bits = exact.view(np.uint32) + np.uint32(_DROPPED // 2)
    scale = np.maximum((bits & ~np.uint32(_DROPPED)).view(np.float32), least_scale(dtype)).astype(dtype)
    if dtype == np.float16:  # among its smallest numbers the nearest may be far too small
        short = largest > scale.astype(np.float32) * np.float32(LARGEST[kind] * (1 + 2**-8))
        scale = np.where(short, np.nextafter(scale, np.float16(np.inf)), scale)
    return scale


def least_scale(dtype: np.dtype) -> np.float32:
    """The smallest scale: channels with no weight above it are stored as zeros."""
    return np.float32(2.0**-24 if dtype == np.float16 else 2.0**-126)


def dequantize(values: Shaped[Host, "*out_in"], scale: Float[Host, "*out"], dtype: np.dtype) -> Float[Any, "*out_in"]:
    """The weights that values and scales stand for; exact in float32 and rounded once in a narrower dtype."""
    return (values.astype(np.float32) * _beside(scale, values)).astype(dtype)
