"""Floating-point dtypes as users name them."""

import contextlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from shardzoo.errors import InputError

_SHORT = {"bf16": "bfloat16", "f16": "float16", "fp16": "float16", "f32": "float32", "fp32": "float32"}


def float_dtype(what: str, dtype: Any) -> np.dtype | None:
    """The dtype that `dtype=` of the function `what` asks for; None stays None.

    Raises:
        InputError: none that floating-point numbers are cast to.
    """
    if dtype is None:
        return None
    found: np.dtype | None = None
    with contextlib.suppress(TypeError):
        found = jnp.dtype(_SHORT.get(dtype, dtype) if isinstance(dtype, str) else dtype)
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise InputError(f"{what}: dtype={dtype!r} is no floating-point dtype: use float32, bfloat16 or float16")
    return found
