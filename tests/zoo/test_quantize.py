"""Quantized weights: what is chosen, the numbers, exact round trips, products on meshes."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from mesh_parity import assert_close, harsh
from tiny_flux import CONFIG, collectives, result

from shardzoo.errors import InputError
from shardzoo.zoo import decoder, flux, layout, quantize
from shardzoo.zoo.linears import linear_layers, plain
from shardzoo.zoo.mesh import Degrees, make_mesh
from shardzoo.zoo.quantize import DTYPES, dequantize

KINDS = ("int8", "fp8")
SCALES = tuple(map(np.dtype, ("float32", "float16", ml_dtypes.bfloat16)))
DECODER = decoder.Config(vocab=56, embed=24, layers=3, heads=8, kv_heads=2, head_dim=6, mlp=40, qkv_bias=True)


def hard_weights(shape=(7, 5, 33), seed=0):
    """Channels of very different sizes, one of zeros, one of a single weight, one with an outlier."""
    rng = np.random.default_rng(seed)
    w = (rng.normal(size=shape) * 10.0 ** rng.uniform(-6, 2, size=(*shape[:-1], 1))).astype(np.float32)
    w[0, 0] = 0
    w[1, 1] = 0
    w[1, 1, 3] = -2.5
    w[2, 2, 4] = 1e3 * np.abs(w[2, 2]).max()
    return w


@pytest.mark.parametrize("dtype", SCALES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_nearest_values_and_exact_round_trip(kind, dtype):
    w = hard_weights()
    values, scale = quantize.quantize(w, 1, kind, dtype)
    assert values.dtype == DTYPES[kind] and scale.dtype == dtype and scale.shape == w.shape[:2]
    back = dequantize(values, scale, np.dtype(np.float32))
    step, error = scale.astype(np.float32)[..., None], np.abs(back - w)
    nearest = 0.5 * step if kind == "int8" else np.maximum(np.abs(w) / 16, step / 1024)
    assert (error <= nearest * 1.02).all()
    assert not values[0, 0].astype(np.float32).any() and np.isfinite(scale.astype(np.float32)).all()
    fits = scale.astype(np.float32) > 1e-3 if dtype == np.float16 else scale.astype(np.float32) > 0
    largest = np.abs(values.astype(np.float32)).max(-1)[fits & (np.abs(w).max(-1) > 0)]
    assert (largest == quantize.LARGEST[kind]).all()
    again, same = quantize.quantize(back, 1, kind, dtype)
    assert np.array_equal(again.view(np.uint8)[fits], values.view(np.uint8)[fits])
    used = fits & (np.abs(w).max(-1) > 0)
    assert np.array_equal(same[used], scale[used])
    assert np.array_equal(quantize.at_scale(w, scale, kind).view(np.uint8), values.view(np.uint8))


@pytest.mark.parametrize("kind", KINDS)
def test_odd_sizes_and_large_rows(kind):
    w = np.random.default_rng(0).normal(size=(3, 1, 2**20 + 3)).astype(ml_dtypes.bfloat16)
    values, scale = quantize.quantize(w, 2, kind, np.dtype(np.float32))
    assert scale.shape == (3,)
    alone = quantize.quantize(w[1:2], 2, kind, np.dtype(np.float32))
    assert np.array_equal(values[1:2].view(np.uint8), alone[0].view(np.uint8)) and scale[1] == alone[1][0]
    assert quantize.quantize(np.zeros((0, 4), np.float32), 1, kind, np.dtype(np.float32))[0].shape == (0, 4)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_weights_that_are_no_numbers_are_refused(wrong):
    w = hard_weights()
    w[3, 1, 2] = w[4, 0, 0] = wrong
    with pytest.raises(InputError, match=r"blocks\.x: 2 output channels hold NaN or infinite weights"):
        quantize.quantize(w, 1, "int8", np.dtype(np.float32), "blocks.x")


def test_what_is_quantized_and_how_it_is_split():
    declared = layout.astype(flux.declare(CONFIG), ml_dtypes.bfloat16)
    chosen = quantize.declare(declared, "int8")
    params = layout.named(chosen)
    values = [p for p in params if p.endswith(".values")]
    linear = [p for p in linear_layers(declared) if p.startswith(("double", "single"))]
    assert sorted(values) == sorted(f"{p}.values" for p in linear)
    down, scale = params["single.down.weight.values"], params["single.down.weight.scale"]
    assert (down.dims, down.split, down.dtype) == ("layer embed mlp", {"mlp": ("kv", "rep")}, np.int8)
    assert (scale.dims, scale.split, scale.dtype) == ("layer embed", {}, ml_dtypes.bfloat16)
    qkv = params["double.text.attn.qkv.weight.scale"]
    assert (qkv.dims, qkv.split) == ("layer block heads head_dim", {"heads": ("kv", "rep")})
    assert layout.named(plain(chosen)) == layout.named(declared)
    again = layout.named(layout.astype(chosen, np.float32))
    assert again["single.down.weight.values"].dtype == np.int8
    assert again["single.down.weight.scale"].dtype == np.float32
    assert quantize.kind_of(chosen) == "int8" and quantize.kind_of(declared) is None
    with pytest.raises(InputError, match="quantize='int4' is unknown: use one of int8, fp8"):
        quantize.declare(declared, "int4")


def quantized(declared, values, kind):
    """The declaration and host values with the weights of the blocks quantized, and the values that they stand for."""
    new, host = quantize.declare(declared, kind), layout.named(values)
    params, made = layout.named(new), {p: v for p, v in host.items() if p in layout.named(new)}
    rounded = dict(host)
    for path in (p for p in params if p.endswith(".values")):
        root, scale = path.removesuffix(".values"), path.removesuffix("values") + "scale"
        inputs = params[path].ndim - params[scale].ndim
        made[path], made[scale] = quantize.quantize(host[root], inputs, kind, params[scale].dtype)
        rounded[root] = dequantize(made[path], made[scale], host[root].dtype)
    return new, layout.fill(new, made), layout.fill(declared, rounded)


def run(kind, degrees, at_rest=None, host=False, **options):
    declared = flux.declare(CONFIG)
    mesh = make_mesh(data=degrees.data, context=degrees.context, tensor=degrees.tensor)
    new, made, _ = quantized(declared, harsh(declared), kind)
    new = layout.split_at_rest(new, at_rest, degrees, smallest=64) if at_rest else new
    new = layout.keep_on_host(new, smallest=64) if host else new
    return result(new, mesh, layout.place(new, mesh, made), **options)


@functools.cache
def rounded_result(kind):
    """Of one device, with the weights that values and scales stand for."""
    declared, mesh = flux.declare(CONFIG), make_mesh()
    return result(declared, mesh, layout.place(declared, mesh, quantized(declared, harsh(declared), kind)[2]))


MESHES = [
    ("int8", dict(), dict()),
    ("fp8", dict(tensor=4), dict(residual="seq", host=True)),
    ("int8", dict(tensor=2, context=2), dict(at_rest="context")),
    ("int8", dict(data=2, tensor=4), dict(residual="seq", at_rest="data", host=True)),
]
MORE_MESHES = [
    ("fp8", dict(), dict(remat=True)),
    ("fp8", dict(context=4), dict(at_rest="context", host=True)),
    ("int8", dict(tensor=8), dict(residual="seq")),
    ("int8", dict(context=3), dict(host=True)),
    ("fp8", dict(tensor=2, context=4), dict(residual="seq", at_rest="context")),
]


@pytest.mark.parametrize(
    "kind, degrees, options", [*MESHES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_MESHES)], ids=str
)
def test_the_product_is_that_of_the_rounded_weights(kind, degrees, options):
    assert_close(run(kind, Degrees(**degrees), **options), rounded_result(kind))


def test_no_collective_more():
    declared = flux.declare(CONFIG)
    new = quantize.declare(declared, "int8")
    for degrees, options in ((dict(tensor=4), {}), (dict(tensor=4), dict(residual="seq"))):
        assert collectives(new, degrees, **options) == collectives(declared, degrees, **options)


@pytest.mark.parametrize("degrees", [dict(), dict(tensor=2), dict(tensor=4, context=2)], ids=str)
def test_decoder_and_its_key_heads(degrees):
    """Grouped heads, whose scales are split over `kv` alone; bfloat16 activations where the scales are bfloat16."""
    declared = decoder.declare(DECODER)
    new, made, rounded = quantized(declared, harsh(declared), "int8")
    mesh, one = make_mesh(**degrees, kv_heads=2), make_mesh()
    tokens = np.random.default_rng(0).integers(0, 56, (2, 9))
    got = jax.jit(decoder.forward(new, mesh))(layout.place(new, mesh, made), tokens)
    want = jax.jit(decoder.forward(declared, one))(layout.place(declared, one, rounded), tokens)
    assert_close(np.asarray(got), np.asarray(want))
    half = layout.astype(new, jnp.bfloat16)
    live = layout.place(half, mesh, jax.tree.map(lambda p, v: v.astype(p.dtype), half, made))
    out = jax.jit(decoder.forward(half, mesh))(live, tokens)
    assert out.dtype == jnp.bfloat16
    assert np.abs(np.asarray(out, np.float32) - want).max() < 0.1 * np.abs(want).max()
