"""8-bit floats with a scale beside them, as ComfyUI and others write them: weights are read as the products of the two.

| key                                                 | holds                                                   |
|-----------------------------------------------------|---------------------------------------------------------|
| `<module>.weight`                                   | float8                                                  |
| `<module>.scale_weight` or `<module>.weight_scale`  | one number, or one for each output                      |
| `<module>.scale_input` or `<module>.input_scale`    | what inputs may be scaled by where they are 8 bits too  |
| `<module>.comfy_quant`, `scaled_fp8`                | marks of the format                                     |

Scales of blocks, and weights of other formats, are left as they are: no family knows their keys.
"""

import math
from collections.abc import Mapping

import ml_dtypes
import numpy as np
from jaxtyping import Float, Shaped

from shardzoo.convert.file_bytes import Stored

FLOATS = frozenset(map(np.dtype, (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)))
PRODUCT = np.dtype(ml_dtypes.bfloat16)  # holds every one of their values, and more of the scale than they have digits
_SCALES = ("scale_weight", "weight_scale")
_BESIDE = ("scale_input", "input_scale", "comfy_quant")
_MARK = "scaled_fp8"
_BLOCK = 1 << 20  # elements worked on at a time


def find_scales(tensors: Mapping[str, Stored]) -> tuple[dict[str, str], set[str]]:
    """Key of a weight -> key of its scale; and the keys, those of scales among them, that stand beside such weights."""
    scales: dict[str, str] = {}
    beside: set[str] = set()
    for key, weight in tensors.items():
        module = key.removesuffix("weight")
        scale = next((module + name for name in _SCALES if module + name in tensors), None)
        if module != key and scale is not None and _is_scaled(weight, tensors[scale]):
            scales[key] = scale
            beside |= {scale, *(module + name for name in _BESIDE if module + name in tensors)}
    if scales:
        beside |= {key for key in tensors if key.rpartition(".")[2] == _MARK}
    return scales, beside


def _is_scaled(weight: Stored, scale: Stored) -> bool:
    each = weight.shape[:1]
    sizes = ((), (1,), (1, 1), each, (*each, 1))
    return weight.dtype in FLOATS and bool(each) and scale.dtype.kind in "fV" and scale.shape in sizes


def product(weight: Shaped[np.ndarray, "rows ..."], scale: Shaped[np.ndarray, "..."]) -> Float[np.ndarray, "rows ..."]:
    """Rows of a weight times their scales, of which there are as many or one: in float32, rounded once."""
    flat = weight.reshape(len(weight), math.prod(weight.shape[1:]))
    made = np.empty(flat.shape, PRODUCT)
    factors = scale.astype(np.float32).reshape(-1, 1)
    step = max(1, _BLOCK // max(flat.shape[1], 1))
    for start in range(0, len(flat), step):
        rows = slice(start, start + step)
        made[rows] = flat[rows].astype(np.float32) * (factors[rows] if len(factors) > 1 else factors)
    return made.reshape(weight.shape)
