"""The GPU kernels of the gated delta rule: in Pallas' interpreter against the definition, and lowered for CUDA."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gated_delta_cases import agree, every_part, everything, exact, inputs
from jax.sharding import PartitionSpec as P

from shardzoo.errors import InputError
from shardzoo.kernels.gated_delta import gated_delta, gated_delta_parts, gpu, which_implementation

TOLERANCE = 1e-5  # in float32, of the largest element
FORWARD = ["gated_delta_prepare", "gated_delta_scan"]
ALL = ["gated_delta_prepare", "gated_delta_scan", *FORWARD, "gated_delta_chain", "gated_delta_gradients"]

CASES = {
    "wiped states": dict(seq=70, batch=1, key_heads=2, group=2, key_dim=16, value_dim=24, decay=np.inf),
    "less than a chunk": dict(seq=17, group=1, key_dim=64, value_dim=64),
    "whole chunks": dict(seq=128, batch=1, key_heads=1, group=3, key_dim=128, value_dim=128, decay=0.02),
    "one token": dict(seq=1, batch=1, key_heads=1, group=2),
    "odd sizes": dict(seq=200, key_heads=1, group=1, key_dim=5, value_dim=70, decay=0.01),
}
QUICK = ("wiped states",)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in CASES])
def test_is_the_definition(name):
    """Outputs, final state and all gradients, also through the final state."""
    x = inputs(**CASES[name])
    with gpu.interpreted():
        got = everything(x, "gpu", np.float32)
    agree(got, exact(x), TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("decay", [0.05, np.inf])
def test_parts(decay):
    """What is left of the identity may be small: its error is relative to the identity that it begins as."""
    x = inputs(70, batch=1, key_heads=1, group=2, key_dim=16, value_dim=24, decay=decay)
    with jax.enable_x64(True):
        want = every_part(x, "reference", np.float64)
    with gpu.interpreted():
        got = every_part(x, "gpu", np.float32)
    left = got.pop("transition") - want.pop("transition")
    assert np.abs(left).max() <= TOLERANCE
    agree(got, want, TOLERANCE)


@pytest.mark.slow
def test_masks():
    x = inputs(70, key_dim=16, value_dim=16)
    mask = jnp.asarray(np.random.default_rng(0).random((2, 70)) < 0.5)
    with gpu.interpreted():
        got = everything(x, "gpu", np.float32, mask)
    agree(got, exact(x, mask), TOLERANCE)


def rms(x):
    return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))


def test_bfloat16():
    """Every result is near that of float32 on the same numbers: within a few roundings of a bfloat16's 8 bits."""
    x = inputs(140, batch=1, key_heads=1, group=1, key_dim=32, value_dim=32, decay=0.1)
    low = {n: jnp.asarray(a, jnp.bfloat16 if n in "qkv" else jnp.float32) for n, a in x.items()}

    def results(x, implementation):
        def total(x):
            out, last = gated_delta(**x, implementation=implementation)
            return jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(jnp.sin(last)), (out, last)

        return jax.jit(jax.value_and_grad(total, has_aux=True))(x)

    want = results({n: a.astype(jnp.float32) for n, a in low.items()}, "chunked")
    with gpu.interpreted():
        got = results(low, "gpu")
    for name, a in got[1].items():
        assert a.dtype == low[name].dtype
    for a, b in zip(jax.tree.leaves((got[0][1], got[1])), jax.tree.leaves((want[0][1], want[1])), strict=True):
        assert rms(a.astype(jnp.float32) - b) <= 2.0**-7 * rms(b)


def lowered(f, *shapes) -> str:
    return jax.jit(f).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def kernels_in(text: str) -> list[str]:
    """The names of the Triton kernels that a program calls, sorted."""
    found = [n for n in sorted(set(ALL)) for _ in range(text.count(f'name = "{n}"'))]
    assert len(found) == text.count("__gpu$xla.gpu.triton")
    return found


def shapes(seq, key_heads, group, key_dim, value_dim, dtype, batch=1):
    heads = key_heads * group
    sizes = [(batch, seq, key_heads, key_dim)] * 2 + [(batch, seq, heads, value_dim)] + [(batch, seq, heads)] * 2
    arrays = [jax.ShapeDtypeStruct(s, dtype if n < 3 else jnp.float32) for n, s in enumerate(sizes)]
    return [*arrays, jax.ShapeDtypeStruct((batch, heads, key_dim, value_dim), jnp.float32)]


def gradients(parts, *x, implementation="gpu"):
    def total(*x):
        call = partial(gated_delta_parts, *x[:5]) if parts else partial(gated_delta, *x[:5], state=x[5])
        return sum(jnp.sum(y.astype(jnp.float32) ** 2) for y in call(implementation=implementation))

    return jax.grad(total, range(6))(*x)


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lowers_for_cuda(dtype, parts):
    """Every kernel becomes Triton IR, forward and backward."""
    text = lowered(partial(gradients, parts), *shapes(100, 2, 3, 128, 100, dtype))
    assert kernels_in(text) == sorted(ALL)


def test_platform_is_chosen_when_lowering():
    """The same traced call holds Triton kernels for CUDA, and none for a CPU."""
    traced = jax.jit(partial(gradients, False, implementation=None)).trace(*shapes(100, 1, 2, 64, 64, jnp.bfloat16))
    assert kernels_in(traced.lower(lowering_platforms=("cuda",)).as_text()) == sorted(ALL)
    assert kernels_in(traced.lower(lowering_platforms=("cpu",)).as_text()) == []


def test_lowers_for_cuda_in_shard_map():
    """Types of what varies over which axes hold together; gradients of whole keys are summed over the mesh."""
    mesh = jax.make_mesh((2, 2), ("data", "kv"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    split = [P("data"), P("data"), *[P("data", None, "kv")] * 3, P("data", "kv")]

    def forward(*x):
        return gated_delta(*x[:5], state=x[5], implementation="gpu")[0]

    mapped = jax.shard_map(forward, mesh=mesh, in_specs=tuple(split), out_specs=split[2], check_vma=True)
    loss = jax.grad(lambda *x: (mapped(*x).astype(jnp.float32) ** 2).sum(), range(6))
    text = lowered(loss, *shapes(64, 1, 4, 32, 32, jnp.bfloat16, batch=2))
    assert kernels_in(text) == sorted(ALL) and text.count("stablehlo.all_reduce") >= 2


def test_choice():
    assert which_implementation(2, platform="cuda") == "gpu" and which_implementation(1, platform="cuda") == "reference"
    assert which_implementation(2, platform="cuda", key_dim=300) == "chunked"
    assert which_implementation(2, platform="cuda", dtype=jnp.float16) == "chunked"
    x = {n: jnp.asarray(a, jnp.float16) for n, a in inputs(5).items()}
    with pytest.raises(InputError, match=r"the dtype float16 of q is none.*use implementation='chunked'"):
        gated_delta(**x, implementation="gpu")
