"""Convolutions whose rows are split, against PyTorch's: heights that do not divide, anything in the padding, pieces."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import P
from mesh_parity import assert_close, harsh
from torch.nn import functional

from shardzoo.zoo import conv_pairs, layout
from shardzoo.zoo.conv import (
    SPLIT,
    CausalConv3d,
    ChannelNorm,
    Conv2d,
    GroupNorm,
    Pointwise,
    attend_pixels,
    nearest_twice,
    padded_height,
)
from shardzoo.zoo.layers import ColumnLinear
from shardzoo.zoo.layout import Param
from shardzoo.zoo.mesh import make_mesh

slow = pytest.mark.slow
MESHES = [dict(context=3), dict(context=2, tensor=4)]
MESHES += [pytest.param(m, marks=slow) for m in (dict(), dict(context=2), dict(data=2, tensor=3))]
UNOPTIMIZED = {"xla_backend_optimization_level": 0}
rng = np.random.default_rng(0)


def normal(*shape):
    return rng.normal(size=shape).astype(np.float32)


def first(x):
    """Channels first, as PyTorch has them."""
    return np.moveaxis(x, -1, 1)


def padded(x, mesh, multiple=1):
    """x [batch, (frames,) rows, width, channels] with rows that mean nothing, large ones, as the mesh needs them."""
    axis, height = x.ndim - 3, x.shape[-3]
    ways = mesh.size // mesh.shape["data"]
    extra = [(0, 0)] * x.ndim
    extra[axis] = (0, padded_height(height, ways, multiple) - height)
    return np.pad(x, extra, constant_values=1e3)


def split(x):
    return P("data", *[None] * (x.ndim - 4), SPLIT)


def output_and_gradients(layer, x, call, out_height, mesh, multiple=1):
    """What `call(layer, x, height)` gives on the mesh, and the gradients of a weighted sum, for the layer and x."""
    live, height = layout.place(layer, mesh, harsh(layer)), x.shape[-3]
    given = jnp.asarray(padded(x, mesh, multiple))
    specs = (layout.specs(layer), split(x))
    shard = jax.shard_map(lambda m, a: call(m, a, height), mesh=mesh, in_specs=specs, out_specs=split(x))

    def run(live, given):
        return jnp.take(shard(live, given), jnp.arange(out_height), axis=x.ndim - 3)

    def total(live, given):
        out = run(live, given)
        return jnp.sum(out * np.random.default_rng(1).normal(size=out.shape).astype(np.float32)), out

    (_, out), (layer_grad, x_grad) = jax.jit(
        jax.value_and_grad(total, (0, 1), has_aux=True), compiler_options=UNOPTIMIZED
    )(live, given)
    rest = np.asarray(jnp.take(x_grad, jnp.arange(height, given.shape[-3]), axis=x.ndim - 3))
    assert not rest.any()  # nothing depends on what the padding holds
    grads = layout.named(layer_grad) | {"x": jnp.take(x_grad, jnp.arange(height), axis=x.ndim - 3)}
    return np.asarray(out), jax.tree.map(np.asarray, grads)


def expected(layer, x, call):
    """The same from `call(weights by name, x)` of PyTorch, channels first, in float64."""
    weights = {
        k: torch.tensor(v, dtype=torch.float64, requires_grad=True) for k, v in layout.named(harsh(layer)).items()
    }
    given = torch.tensor(first(x), dtype=torch.float64, requires_grad=True)
    out = call(weights, given)
    last = out.detach().movedim(1, -1).numpy()
    cotangent = np.random.default_rng(1).normal(size=last.shape)
    (out * torch.tensor(cotangent).movedim(-1, 1)).sum().backward()
    grads = {k: v.grad.numpy() for k, v in weights.items()} | {"x": given.grad.movedim(1, -1).numpy()}
    return last, grads


@pytest.mark.parametrize("degrees", MESHES, ids=str)
@pytest.mark.parametrize("window, height", [(3, 7), (3, 2), pytest.param(1, 5, marks=slow)])
def test_conv2d(degrees, window, height):
    layer, x = Conv2d.declare(3, 5, window), normal(2, height, 6, 3)
    got = output_and_gradients(layer, x, lambda m, a, h: m(a, h), height, make_mesh(**degrees))
    want = expected(layer, x, lambda w, a: functional.conv2d(a, w["weight"], w["bias"], padding=window // 2))
    assert_close(got, want)


@pytest.mark.parametrize("degrees", MESHES, ids=str)
@pytest.mark.parametrize("height, width", [pytest.param(12, 6, marks=slow), (11, 7), (2, 3)])
def test_conv2d_of_stride_two(degrees, height, width):
    """Zeros on the right and at the bottom; what is left over of odd sizes is dropped."""
    layer, x = Conv2d.declare(3, 5, 3, stride=2), normal(2, height, width, 3)
    mesh = make_mesh(**degrees)
    got = output_and_gradients(layer, x, lambda m, a, h: m(a, h), height // 2, mesh, multiple=2)

    def call(w, a):
        return functional.conv2d(functional.pad(a, (0, 1, 0, 1)), w["weight"], w["bias"], stride=2)

    assert_close(got, expected(layer, x, call))


@pytest.mark.parametrize("degrees", MESHES, ids=str)
def test_upsampling(degrees):
    layer, x = Conv2d.declare(3, 4, 3), normal(2, 5, 4, 3)
    got = output_and_gradients(layer, x, lambda m, a, h: m(nearest_twice(a), 2 * h), 10, make_mesh(**degrees))

    def call(w, a):
        twice = functional.interpolate(a, scale_factor=2, mode="nearest-exact")
        return functional.conv2d(twice, w["weight"], w["bias"], padding=1)

    assert_close(got, expected(layer, x, call))


def in_pieces(layer, x, pieces, degrees):
    """What `output_and_gradients` has of a causal convolution through its caches, and what is expected of it."""

    def call(m, a, height):
        outs, cache = [], None
        for piece in jnp.split(a, np.cumsum(pieces)[:-1], axis=1):
            out, cache = m(piece, height, cache)
            outs.append(out)
        return jnp.concatenate(outs, axis=1)

    def reference(w, a):
        return functional.conv3d(functional.pad(a, (1, 1, 1, 1, 2, 0)), w["weight"], w["bias"])

    return output_and_gradients(layer, x, call, x.shape[2], make_mesh(**degrees)), expected(layer, x, reference)


@pytest.mark.parametrize("degrees", MESHES, ids=str)
@pytest.mark.parametrize("pieces", [pytest.param((1, 4), marks=slow), (1, 1, 2, 1)])
def test_causal_convolution_in_pieces(degrees, pieces):
    """Through the caches as over the whole video with two frames of zeros before it."""
    layer, x = CausalConv3d.declare(3, 4), normal(2, sum(pieces), 5, 4, 3)
    assert_close(*in_pieces(layer, x, pieces, degrees))


@pytest.mark.parametrize("degrees", [MESHES[0], *(pytest.param(m, marks=slow) for m in (dict(), MESHES[1]))], ids=str)
@pytest.mark.parametrize(
    "channels, out, pieces, sizes",
    [(33, 32, (1, 1, 2, 4), (5, 3)), pytest.param(128, 129, (1, 2, 1), (27, 31), marks=slow)],
)
def test_pairs_of_frames_and_columns(degrees, channels, out, pieces, sizes):
    """Convolutions of many channels multiply less often on CPUs (`conv_pairs`), and give the same."""
    layer, x = CausalConv3d.declare(channels, out), normal(2, sum(pieces), *sizes, channels)
    assert_close(*in_pieces(layer, x, pieces, degrees))


@pytest.mark.parametrize("frames", [1, 2])
@pytest.mark.parametrize("sizes", [(16, 17), (3, 5)])
def test_wide_windows_in_pairs(frames, sizes):
    """Columns too where pixels are many; a border on one side alone; more rows than the window leaves."""
    weight, seen = normal(130, 128, 3, 3, 3) * 0.02, normal(1, frames + 2, *sizes, 128)
    borders = ((0, 1), (1, 0))
    run = jax.jit(lambda x, w: conv_pairs.convolve_in_pairs(x, w, borders))
    text = run.lower(seen, weight).as_text()
    by_pairs = (2 - frames % 2) ** 2 * (4 if np.prod(sizes) >= conv_pairs.PIXELS else 1)
    assert text.count("stablehlo.convolution") == by_pairs
    wide = functional.pad(torch.tensor(seen, dtype=torch.float64).permute(0, 4, 1, 2, 3), (1, 0, 0, 1))
    expected = functional.conv3d(wide, torch.tensor(weight, dtype=torch.float64)).permute(0, 2, 3, 4, 1).numpy()
    got = np.asarray(run(seen, weight))
    assert np.abs(got - expected).max() <= 3e-6 * np.abs(expected).max()


@pytest.mark.parametrize("channels", [3, conv_pairs.FEW])
def test_a_scan_on_a_cpu_runs_fast_convolutions(channels):
    """Those of XLA take the window first and output channels last; it rearranges others outside of loops only."""
    mesh, layer = make_mesh(), CausalConv3d.declare(channels, channels)

    def frames(m, x):
        def body(cache, frame):
            y, cache = m(frame, 4, cache)
            return cache, y

        return jax.lax.scan(body, x[0], x)[1]

    run = jax.shard_map(frames, mesh=mesh, in_specs=P(), out_specs=P())
    video = jax.ShapeDtypeStruct((3, 1, 2, 4, 4, channels), jnp.float32)
    text = jax.jit(run).lower(layout.abstract(layer, mesh), video).compile().as_text()
    labels = re.findall(r" convolution\(.*dim_labels=([^,\s]+)", text)
    assert labels and set(labels) == {"b01f_01io->b01f"}
    computations = dict(re.findall(r"^(?:ENTRY )?%([\w.\-]+) \(.*?\{$(.*?)^\}", text, re.M | re.S))
    body = computations[re.search(r" while\(.*body=%([\w.\-]+)", text)[1]]
    called = [computations[name] for name in re.findall(r"calls=%([\w.\-]+)", body)]
    assert not re.search(r" (dot|transpose)\(", body + "".join(called))  # weights are brought into order once, before


def test_pointwise():
    layer, x = Pointwise.declare(3, 5), normal(2, 4, 6, 3)
    got = output_and_gradients(layer, x, lambda m, a, h: m(a), 4, make_mesh(context=2))

    def call(w, a):
        return functional.conv2d(a, w["weight"][..., None, None], w["bias"])

    assert_close(got, expected(layer, x, call))


@pytest.mark.parametrize("degrees", MESHES, ids=str)
@pytest.mark.parametrize("height, offset", [(7, 0.0), (2, 40.0)])
def test_group_norm(degrees, height, offset):
    """Over all devices' rows and no others; numbers far from zero lose nothing."""
    layer, x = GroupNorm.declare(6, 3), normal(2, height, 5, 6) * 3 + np.float32(offset)
    got = output_and_gradients(layer, x, lambda m, a, h: m(a, h), height, make_mesh(**degrees))
    assert_close(got, expected(layer, x, lambda w, a: functional.group_norm(a, 3, w["weight"], w["bias"], eps=1e-6)))


def test_group_norm_is_wide_inside():
    norm = GroupNorm(jnp.ones(4), jnp.zeros(4), groups=2)
    x = jnp.asarray(300 + normal(1, 8, 8, 4), jnp.bfloat16)
    run = jax.shard_map(lambda a: norm(a, 8), mesh=make_mesh(), in_specs=split(x), out_specs=split(x))
    want = functional.group_norm(torch.tensor(first(np.asarray(x, np.float32))), 2, eps=1e-6)
    assert run(x).dtype == jnp.bfloat16
    np.testing.assert_allclose(first(np.asarray(run(x), np.float32)), want, atol=0.02)


@pytest.mark.parametrize("degrees", MESHES, ids=str)
def test_attention_of_pixels(degrees):
    weights = Param("block out channels", (3, 6, 6)), Param("block out", (3, 6))
    layer, x = ColumnLinear(*weights), normal(2, 7, 5, 6)
    got = output_and_gradients(layer, x, lambda m, a, h: attend_pixels(a, m, h), 7, make_mesh(**degrees))

    def call(w, a):
        pixels = a.flatten(2).transpose(1, 2)
        q, k, v = (pixels @ w["weight"][i].T + w["bias"][i] for i in range(3))
        return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(a.shape)

    want = expected(layer, x, call)
    for grads in (got[1], want[1]):
        grads["bias"] = grads["bias"][::2]  # a bias of all keys changes no softmax: its gradient is rounding noise
    assert_close(got, want)


def test_channel_norm_is_of_length_one_and_not_of_an_epsilon():
    """Also of pixels near zero; a pixel of zeros stays zero, with a finite gradient."""
    norm = ChannelNorm(jnp.asarray(normal(6)))
    x = normal(4, 6) * np.array([[1.0], [1e-6], [1e-15], [0.0]], np.float32)
    want = functional.normalize(torch.tensor(x), dim=-1).numpy() * 6**0.5 * np.asarray(norm.weight)
    np.testing.assert_allclose(norm(jnp.asarray(x)), want, rtol=2e-6)
    grad = jax.grad(lambda a: norm(a).sum())(jnp.asarray(x))
    assert np.isfinite(grad).all()
    assert norm(jnp.asarray(x, jnp.bfloat16)).dtype == jnp.bfloat16


def test_padded_heights():
    assert [padded_height(7, 1, 8), padded_height(7, 2), padded_height(7, 2, 4), padded_height(8, 4, 2)] == [7, 8, 8, 8]
