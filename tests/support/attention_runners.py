"""How each implementation is run on the machine that the tests run on."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from jax.experimental.pallas import tpu as pltpu

from shardzoo.kernels.flash_attention import gpu


@dataclass(frozen=True)
class Runner:
    """`context` makes the implementation runnable here; a case of more than `quick` logits is marked
    slow. `shard_map` says whether it can run inside one here: Pallas' plain interpreter cannot."""

    implementation: str
    context: Callable[[], AbstractContextManager]
    quick: int
    shard_map: bool = True


RUNNERS = [
    Runner("reference", nullcontext, 2**25),
    Runner("blockwise", nullcontext, 2**26),
    Runner("tpu", pltpu.force_tpu_interpret_mode, 2**18),
    Runner("gpu", gpu.interpreted, 2**18, shard_map=False),
]
