"""Memory read off traced programs: by hand for small ones."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shardzoo.zoo.liveness import liveness_of
from shardzoo.zoo.mesh import make_mesh


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def peak(function, *arguments, **options):
    return liveness_of(function, *arguments, **{"tiled": False} | options).peak


def test_a_product_takes_its_result():
    held = liveness_of(lambda x, w: x @ w, f32(4, 8), f32(8, 16), tiled=False)
    assert held.peak == held.results == 4 * 16 * 4


def test_what_is_computed_where_it_is_read_takes_nothing():
    def f(x, w):
        y = jnp.exp(x) * 2 + jnp.sin(x)[None][0]
        return jnp.sum(y.astype(jnp.bfloat16).astype(jnp.float32) * w)

    assert peak(f, f32(64, 64), f32(64, 64)) == 4


def test_two_products_alive_at_once():
    def f(x, a, b):
        y = x @ a  # 4 x 16
        z = x @ b  # 4 x 32
        return jnp.sum(y) + jnp.sum(z)

    assert peak(f, f32(4, 8), f32(8, 16), f32(8, 32)) == pytest.approx(4 * (16 + 32) * 4, abs=16)


def test_a_product_is_free_again_after_its_last_reader():
    def f(x, a, b, c):
        for w in (a, b, c):
            x = x @ w
        return x

    widths = f32(8, 100), f32(100, 200), f32(200, 50)
    assert peak(f, f32(4, 8), *widths) == 4 * (100 + 200) * 4


def test_a_scan_holds_its_carry_once_and_the_worst_of_one_turn():
    def f(x, ws):
        def body(x, w):
            return x + (x @ w) @ w.T, None

        return lax.scan(body, x, ws)[0]

    # carry 4 x 8; within a turn x @ w (4 x 32), its product (4 x 8), and the sum, which takes the place of either
    assert peak(f, f32(4, 8), f32(6, 8, 32)) == pytest.approx(4 * (8 + 32 + 8) * 4, rel=0.15)
    assert peak(f, f32(4, 8), f32(6, 8, 32)) == peak(f, f32(4, 8), f32(600, 8, 32))


def test_stacked_results_of_a_scan_count_whole():
    def f(x, ws):
        return lax.scan(lambda x, w: (x @ w, x @ w), x, ws)[1]

    held = liveness_of(f, f32(4, 8), f32(10, 8, 8), tiled=False)
    assert held.results == 10 * 4 * 8 * 4 <= held.peak <= 10 * 4 * 8 * 4 + 3 * 4 * 8 * 4


def test_shapes_are_those_of_one_device():
    mesh = make_mesh(data=2, context=4)
    mapped = jax.shard_map(
        lambda x, w: x @ w, mesh=mesh, in_specs=(P("data", "context"), P()), out_specs=P("data", "context")
    )
    assert peak(lambda x, w: mapped(x, w)[:, :15], f32(8, 16, 32), f32(32, 64)) == 8 * 16 * 64 * 4 // 8


def test_buffers_of_tpus_come_in_tiles():
    assert peak(lambda x, w: x @ w, f32(8, 16), f32(16, 3), tiled=True) == 8 * 128 * 4
    assert peak(lambda x, w: x @ w, f32(128, 16), f32(16, 3), tiled=True) == 8 * 128 * 4  # the other way round


def test_a_convolution_reads_a_copy_on_a_tpu():
    x, w = f32(1, 8, 128, 128), f32(8, 8, 3, 3)
    image = 8 * 128 * 128 * 4
    f = lambda x, w: jax.lax.conv(x * 2, w, (1, 1), "SAME")  # noqa: E731
    assert peak(f, x, w) == peak(f, x, w, tiled=True) == 2 * image
    small = lambda x, w: jax.lax.conv(x * 2, w[:2], (1, 1), "SAME")  # noqa: E731
    assert peak(small, x, w) == image + image // 4 and peak(small, x, w, tiled=True) == 2 * image


def test_a_gradient_keeps_what_it_reads_and_remat_does_not():
    def block(x, w):
        return jnp.tanh(x @ w) @ w.T, None

    def loss(body):
        return lambda ws, x: jnp.sum(lax.scan(body, x, ws)[0])

    ws, x = f32(12, 32, 512), f32(16, 32)
    kept = peak(jax.grad(loss(block)), ws, x)
    again = peak(jax.grad(loss(jax.checkpoint(block))), ws, x)
    hidden, gradient, stream = 12 * 16 * 512 * 4, 12 * 32 * 512 * 4, 12 * 16 * 32 * 4
    assert kept >= hidden + gradient
    assert gradient + stream <= again < kept - hidden // 2


def test_the_worst_moment_is_told():
    held = liveness_of(lambda x, w: jnp.sum(jnp.tanh(x @ w)), f32(64, 8), f32(8, 512), tiled=False)
    what, size = held.holds[0]
    assert "float32[64, 512]" in what and size == 64 * 512 * 4


def test_what_a_turn_keeps_of_a_value_is_copied_out_of_it():
    def f(cache, xs):
        def turn(cache, x):
            both = jnp.concatenate([cache, x])  # 2 + 8 rows
            return lax.dynamic_slice_in_dim(both, 8, 2), jnp.sum(both @ both.T)

        return lax.scan(turn, cache, xs)

    row, turns = 100 * 4, 3
    # Within a turn the rows together, their product, and beside them the two rows that are kept.
    expected = 10 * row + 10 * 10 * 4 + 2 * row
    assert peak(f, f32(2, 100), f32(turns, 8, 100)) == pytest.approx(expected, rel=0.01)


def norm(x):
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True))).astype(x.dtype)


@pytest.mark.parametrize("channels, wide", [(96, True), (128, False)])
def test_pixels_of_few_channels_are_normed_in_memory(channels, wide):
    x = jax.ShapeDtypeStruct((1, 8, 128, channels), jnp.bfloat16)
    found = peak(norm, x, tiled=True)
    small = 8 * 128 * channels * 2
    assert found >= 3 * 2 * small if wide else found <= 2 * small


def test_a_convolution_s_copy_is_there_beside_its_result():
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 8, 128, 128), (3, 3, 128, 256)))
    dims = ("NHWC", "HWIO", "NHWC")
    f = lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dims)  # noqa: E731
    assert peak(f, x, w, tiled=True) == 8 * 128 * (128 + 256) * 4
