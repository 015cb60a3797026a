"""Kernels by their outlines, for programs that are traced to be counted and never run.

Writing out what a kernel does is most of the time that tracing a model takes, and nothing that memory or costs are
counted by: those stand in the kernel's operands, results and estimate. On a mesh of outlined devices the call is as
ever, and its body empty. That stands in the kind of the mesh's devices, which no machine has: what JAX keeps of a trace
it keeps by the mesh, so nothing that runs can meet an outline, and nothing can be compiled for one.
"""

from collections.abc import Callable
from typing import Any

import jax

_MARK = " (outlined)"


def outlined(kind: str) -> str:
    """The kind of devices, like those of the given kind, that kernels are only outlined for."""
    return kind + _MARK


def device_kind() -> str | None:
    """The kind of the TPUs of the mesh that is being traced for, outlined or not; None if it has none."""
    kind = _kind()
    return None if kind is None else kind.removesuffix(_MARK)


def body_of(kernel: Callable[..., None]) -> Callable[..., None]:
    """The kernel, or on a mesh of outlined devices one that does nothing."""
    kind = _kind()
    return _nothing if kind is not None and kind.endswith(_MARK) else kernel


def _kind() -> str | None:
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.device_kind if device is not None and device.platform == "tpu" else None


def _nothing(*refs: Any) -> None:
    pass
