"""The TPU kernels in Pallas' TPU interpreter, with blocks so small that short lengths take several of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from jax.experimental.pallas import tpu as pltpu

from shardzoo.kernels.flash_attention import tpu_backward, tpu_blocks
from shardzoo.kernels.flash_attention.tpu_blocks import Blocks

SMALL: dict[tpu_blocks.Pass, Blocks] = {
    "forward": Blocks(q=256, kv=512, tile_q=128, tile_kv=256, registers=True),
    "backward": Blocks(q=256, kv=256, tile_q=256, tile_kv=128),
    "bias": Blocks(q=256, kv=256, tile_q=256, tile_kv=256),
}
WIDE: dict[tpu_blocks.Pass, Blocks] = {
    "forward": Blocks(q=256, kv=512, tile_q=256, tile_kv=128, ahead=4),
    "backward": Blocks(q=512, kv=256, tile_q=128, tile_kv=256),
    "bias": Blocks(q=256, kv=256, tile_q=256, tile_kv=256),
}


@contextmanager
def interpreted(
    blocks: dict[tpu_blocks.Pass, Blocks] = SMALL, params: pltpu.InterpretParams | None = None
) -> Iterator[None]:
    """What is traced inside runs in the interpreter, with these blocks, and with dq going through HBM."""
    if params is None:
        params = pltpu.InterpretParams(dma_execution_mode="eager")
    with (
        mock.patch.object(tpu_blocks, "_NARROW", blocks),
        mock.patch.object(tpu_backward, "_RESIDENT_BYTES", 0),
        pltpu.force_tpu_interpret_mode(params),
    ):
        yield
