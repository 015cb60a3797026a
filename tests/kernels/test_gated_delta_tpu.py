"""The TPU kernels of the gated delta rule: in Pallas' TPU interpreter against the definition, and the TPU compiler."""

import os

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

from contextlib import contextmanager
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gated_delta_cases import agree, every_part, everything, exact, inputs
from jax import P
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding

from shardzoo.errors import InputError
from shardzoo.kernels.gated_delta import gated_delta, gated_delta_parts, tpu_layout, which_implementation
from shardzoo.kernels.gated_delta.tpu_chunk import CHUNK, inverses

TOLERANCE = 1e-5  # in float32, of the largest element
TOO_LARGE = (256, 256), "float32"  # head dims and dtype whose states a chip's fast memory does not hold
SMALL = {"forward": (128, 1), "backward": (128, 1)}  # a chunk a step
TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "7x": "tpu7x:2x2x1"}


@contextmanager
def interpreted(together=SMALL):
    """What is traced inside runs in the interpreter, with so many tokens and key heads in a grid step."""
    with (
        mock.patch.object(tpu_layout, "TOGETHER", together),
        pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(dma_execution_mode="eager")),
    ):
        yield


CASES = {
    "wiped states": dict(seq=150, batch=1, key_heads=1, group=2, key_dim=16, value_dim=24, decay=np.inf),
    "less than a chunk": dict(seq=37, key_heads=2, group=1, key_dim=64, value_dim=64),
    "whole chunks": dict(seq=256, batch=1, key_heads=2, group=3, key_dim=128, value_dim=128, decay=0.02),
    "one token": dict(seq=1, batch=1, key_heads=1, group=2),
    "long": dict(seq=700, key_heads=1, group=1, key_dim=5, value_dim=9, decay=0.01),
    "no decay": dict(seq=200, batch=1, key_heads=1, group=4, key_dim=64, value_dim=130, decay=0.0),
    "wide keys": dict(seq=130, batch=1, key_heads=1, group=1, key_dim=200, value_dim=16, decay=0.1),
}
QUICK = ("wiped states",)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in CASES])
def test_is_the_definition(name):
    """Outputs, final state and all gradients, also through the final state."""
    x = inputs(**CASES[name])
    with interpreted():
        got = everything(x, "tpu", np.float32)
    agree(got, exact(x), TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("together", [(256, 2), (384, 1), (128, 3)])
def test_steps_of_several_chunks_and_key_heads(together):
    """Three key heads: two do not divide them, so that one at a time is taken."""
    x = inputs(600, batch=1, key_heads=3, group=2, key_dim=16, value_dim=16, decay=np.inf)
    with (
        interpreted({"forward": together, "backward": together}),
        mock.patch.object(tpu_layout, "MOST_HEADS", 12),  # float32 takes half as many
    ):
        got = everything(x, "tpu", np.float32)
    agree(got, exact(x), TOLERANCE)


@pytest.mark.slow
def test_masks():
    x = inputs(150, key_dim=16, value_dim=16)
    mask = jnp.asarray(np.random.default_rng(0).random((2, 150)) < 0.5)
    with interpreted():
        got = everything(x, "tpu", np.float32, mask)
    agree(got, exact(x, mask), TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("decay", [0.05, np.inf])
def test_parts(decay):
    """What is left of the identity may be small: its error is relative to the identity that it begins as."""
    x = inputs(150, batch=1, key_heads=1, group=2, key_dim=16, value_dim=24, decay=decay)
    with jax.enable_x64(True):
        want = every_part(x, "reference", np.float64)
    with interpreted():
        got = every_part(x, "tpu", np.float32)
    left = got.pop("transition") - want.pop("transition")
    assert np.abs(left).max() <= TOLERANCE
    agree(got, want, TOLERANCE)


def rms(x):
    return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))


def test_bfloat16():
    """Every result is near that of float32 on the same numbers: within a few roundings of a bfloat16's 8 bits."""
    x = inputs(140, batch=1, key_heads=1, group=1, key_dim=64, value_dim=64, decay=0.1)
    low = {n: jnp.asarray(a, jnp.bfloat16 if n in "qkv" else jnp.float32) for n, a in x.items()}
    weights = [
        jnp.asarray(np.random.default_rng(n).normal(size=x[name].shape)) for n, name in enumerate(("v", "state"))
    ]

    def results(x, implementation):
        def total(x):
            out, last = gated_delta(**x, implementation=implementation)
            return jnp.sum(out * weights[0]) + jnp.sum(last * weights[1]), (out, last)

        return jax.jit(jax.value_and_grad(total, has_aux=True))(x)

    want = results({n: a.astype(jnp.float32) for n, a in low.items()}, "chunked")
    with interpreted():
        got = results(low, "tpu")
    assert got[0][1][0].dtype == jnp.bfloat16 and got[0][1][1].dtype == jnp.float32
    for name, a in got[1].items():
        assert a.dtype == low[name].dtype
    for a, b in zip(jax.tree.leaves((got[0][1], got[1])), jax.tree.leaves((want[0][1], want[1])), strict=True):
        assert rms(a.astype(jnp.float32) - b) <= 2.0**-7 * rms(b)


@pytest.mark.parametrize("low", [False, True])
def test_inverse_in_the_kernel(low):
    """Also where the powers of L reach 1e38 and more: all ones, whose inverse is small."""
    rng = np.random.default_rng(0)
    keys = rng.normal(size=(CHUNK, 16)) + 1.0
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    lowers = [np.tril(np.ones((CHUNK, CHUNK)), -1), np.tril(keys @ keys.T * rng.random(CHUNK), -1)]
    lowers = [np.asarray(x, np.float32) for x in lowers]
    with interpreted():
        got = jax.jit(lambda *x: inverses(x, low=low))(*lowers)
    for x, a in zip(lowers, got, strict=True):
        want = np.linalg.inv(np.eye(CHUNK) + x)
        assert np.abs(a - want).max() <= (3e-3 if low else TOLERANCE) * np.abs(want).max()
        assert not np.triu(a, 1).any()


def on_chip(chip, call, *shapes):
    """The compiled text of a call on one chip that this machine does not have, under shard_map's type check."""
    device = topologies.get_topology_desc(TOPOLOGIES[chip], platform="tpu").devices[0]
    mesh = Mesh(np.array([device]), ("data",))
    specs = tuple(P("data") for _ in shapes)
    whole = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=True)
    placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P("data"))) for x in shapes]
    return jax.jit(whole).lower(*placed).compile().as_text()


def gradients(parts):
    def step(q, k, v, log_decay, beta, state):
        def total(*x):
            found = gated_delta_parts(*x[:5]) if parts else gated_delta(*x[:5], state=x[5])
            return sum(jnp.sum(y.astype(jnp.float32) ** 2) for y in found)

        return jax.grad(jax.checkpoint(total), range(6))(q, k, v, log_decay, beta, state)

    return step


def shapes(seq, key_heads, group, key_dim, value_dim, dtype):
    heads = key_heads * group
    sizes = [(1, seq, key_heads, key_dim)] * 2 + [(1, seq, heads, value_dim)] + [(1, seq, heads)] * 2
    arrays = [jax.ShapeDtypeStruct(s, dtype if n < 3 else jnp.float32) for n, s in enumerate(sizes)]
    return [*arrays, jax.ShapeDtypeStruct((1, heads, key_dim, value_dim), jnp.float32)]


def compiles(chip, sizes, parts):
    text = on_chip(chip, gradients(parts), *shapes(*sizes))
    for kernel in ("gated_delta_forward", "gated_delta_states", "gated_delta_backward"):
        assert kernel in text


def test_compiles_for_v5e():
    """Forward, remat and backward; a length that ends within a block."""
    compiles("v5e", (600, 2, 3, 128, 128, jnp.bfloat16), parts=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dims, dtype, parts",
    [
        (dims, dtype, parts)
        for dims in [(128, 128), (64, 40), (256, 256)]
        for dtype in ("bfloat16", "float32")
        for parts in (False, True)
        if (dims, dtype) != TOO_LARGE
    ],
)
@pytest.mark.parametrize("chip", list(TOPOLOGIES))
def test_fits_into_vmem(chip, dims, dtype, parts):
    compiles(chip, (1000, 4, 3, *dims, dtype), parts)


@pytest.mark.parametrize("parts, columns", [(False, 256), (True, 512)])
def test_refuses_what_does_not_fit(parts, columns):
    """By name if it is asked for; otherwise another implementation runs. In bfloat16 the same sizes are taken."""
    dims, dtype = TOO_LARGE
    asked = partial(gated_delta_parts if parts else gated_delta, implementation="tpu")
    message = rf"3 value heads, 256 x {columns} each, are too large.*implementation='chunked'"
    with pytest.raises(InputError, match=message):
        jax.eval_shape(asked, *shapes(1000, 4, 3, *dims, dtype)[:5])
    chosen = partial(which_implementation, 1000, platform="tpu", key_dim=256, value_dim=256, group=3, parts=parts)
    assert chosen(dtype=dtype) == "chunked" and chosen(dtype="bfloat16") == "tpu"


def test_choice():
    assert which_implementation(2, platform="tpu") == "tpu" and which_implementation(1, platform="tpu") == "reference"
    assert (
        which_implementation(0, platform="tpu") == "chunked" and which_implementation(2, platform="rocm") == "chunked"
    )
    assert which_implementation(2, platform="tpu", dtype=jnp.float16) == "chunked"
    assert which_implementation(2, platform="tpu", key_dim=300) == "chunked"
    assert which_implementation(2, platform="tpu", key_dim=256, value_dim=300, parts=True) == "chunked"
    x = {n: jnp.asarray(a, jnp.float16) for n, a in inputs(5).items()}
    with pytest.raises(InputError, match=r"the dtype float16 of q is none.*use implementation='chunked'"):
        gated_delta(**x, implementation="tpu")
