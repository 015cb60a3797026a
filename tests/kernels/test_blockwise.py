"""What the blockwise version promises beside its numbers: memory linear in the length, tiles that cover a call once."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardzoo.kernels.flash_attention import flash_attention
from shardzoo.kernels.flash_attention.options import Extras, Options, Sizes
from shardzoo.kernels.flash_attention.tiles import TILE_LOGITS, count, even_tile, forward_tiles, start, tile_sizes

attend = partial(flash_attention, implementation="blockwise")


def temporary_bytes(f, *shapes: jax.ShapeDtypeStruct) -> int:
    return jax.jit(f).lower(*shapes).compile().memory_analysis().temp_size_in_bytes


def loss(q, *bias):
    return jnp.square(attend(q, q, q, causal=True, bias=bias[0] if bias else None)).sum()


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
def test_memory_grows_linearly(gradient: bool):
    shapes = [jax.ShapeDtypeStruct((1, n, 2, 64), jnp.float32) for n in (4096, 8192, 32768)]
    short, middle, long = (temporary_bytes(jax.grad(loss) if gradient else loss, q) for q in shapes)
    assert middle <= 2.05 * short and long <= 8.2 * short
    # Less than 16 arrays like q, where the logits alone would be 512 of them.
    assert long < 16 * shapes[-1].size * 4


def test_a_bias_is_not_copied_nor_its_gradient_made_unasked():
    q = jax.ShapeDtypeStruct((1, 2048, 4, 64), jnp.float32)
    bias = jax.ShapeDtypeStruct((1, 4, 2048, 2048), jnp.float32)
    assert temporary_bytes(loss, q, bias) < bias.size
    assert temporary_bytes(jax.grad(loss), q, bias) < bias.size
    assert temporary_bytes(jax.grad(loss, (0, 1)), q, bias) < bias.size


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2)], ids=str)
def test_a_cpu_turns_no_operand_of_a_product(heads: int, kv_heads: int):
    """XLA turns keys that stand before their heads at every step, and sums slowly over the rows of both operands."""
    shapes = [jax.ShapeDtypeStruct((1, 1024, n, 64), jnp.float32) for n in (heads, kv_heads, kv_heads)]

    def both(q, k, v):
        return jax.value_and_grad(lambda q, k, v: jnp.square(attend(q, k, v)).sum(), (0, 1, 2))(q, k, v)

    forward, gradient = (jax.jit(f).lower(*shapes).compile().as_text() for f in (attend, both))
    products = {"forward": 2, "gradient": 2 + 5}
    for name, text in (("forward", forward), ("gradient", gradient)):
        sums = re.findall(r" dot\(.*lhs_contracting_dims=\{(\d)\}", text)
        assert sums == ["1"] * products[name], name
    for line in forward.splitlines():  # of keys or values; queries of a group are brought together, once for all keys
        assert not (" transpose(" in line and line.split("=")[1].strip().startswith("f32[1,1,64,")), line


def test_few_keys_are_one_tile_forwards():
    """No running maximum, nor anything to scale again."""
    size = Sizes(1, 4096, 1408, 4, 4, 1, 128)
    assert forward_tiles(size, Extras(), Options(scale=1.0)).kv == 1408
    assert forward_tiles(size, Extras(), Options(scale=1.0, after=0)) == tile_sizes(size, TILE_LOGITS)


@given(st.integers(1, 40_000), st.integers(1, 1024))
def test_tiles_cover_the_length(length: int, target: int):
    tile = even_tile(length, target)
    starts = [int(start(i, length, tile)) for i in range(min(count(length, tile), 3))]
    last = int(start(count(length, tile) - 1, length, tile))
    assert starts == [min(i * tile, length - tile) for i in range(len(starts))]
    assert last + tile == length and last >= 0
    assert tile <= max(1, -(-target * 5 // 4))


def test_a_step_holds_few_logits():
    """However many heads and rows there are, and a short side makes the other longer."""
    for size in (
        Sizes(1, 32760, 32760, 40, 40, 1, 128),
        Sizes(64, 512, 512, 64, 64, 1, 64),
        Sizes(1, 32760, 257, 12, 12, 1, 128),
        Sizes(8, 1, 8192, 32, 8, 4, 128),
    ):
        tiles = tile_sizes(size, TILE_LOGITS)
        held = tiles.batch * tiles.kv_heads * size.group * tiles.q * tiles.kv
        assert TILE_LOGITS // 4 <= held <= TILE_LOGITS * 2
    assert tile_sizes(Sizes(1, 32760, 257, 12, 12, 1, 128), TILE_LOGITS).q > 512
