"""How each implementation is run on the machine that the tests run on."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from tpu_interpreter import interpreted

from shardzoo.kernels.flash_attention import gpu


@dataclass(frozen=True)
class Runner:
    """`context` makes the implementation runnable here; a case of more than `quick` logits is marked slow.

    `shard_map` says whether it can run inside one of eight devices here: Pallas' plain interpreter cannot, and its
    TPU interpreter waits for all devices at once, which takes as many free threads. `remat` says the same of
    jax.checkpoint, which does not take the TPU interpreter's callbacks. `rounds_queries`: scaled queries are
    rounded to the input's dtype before they meet keys.
    """

    implementation: str
    context: Callable[[], AbstractContextManager]
    quick: int
    shard_map: bool = True
    remat: bool = True
    rounds_queries: bool = False


RUNNERS = [
    Runner("reference", nullcontext, 2**25),
    Runner("blockwise", nullcontext, 2**26),
    Runner("tpu", interpreted, 2**18, shard_map=False, remat=False, rounds_queries=True),
    Runner("gpu", gpu.interpreted, 2**18, shard_map=False),
]
