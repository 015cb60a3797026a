"""Calls of the gated delta rule and what they give: outputs, final state and all gradients, by name."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import P

from shardzoo.kernels.gated_delta import gated_delta, gated_delta_parts

NAMES = ("q", "k", "v", "log_decay", "beta", "state")


def inputs(seq, *, batch=2, key_heads=2, group=3, key_dim=8, value_dim=6, decay=0.3, seed=0):
    """Arrays of a call in float64: unit keys, betas up to 1; `decay` is the mean of -log_decay, inf mixes extremes."""
    rng = np.random.default_rng(seed)
    heads = key_heads * group
    q, k = rng.normal(size=(2, batch, seq, key_heads, key_dim))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    shape = (batch, seq, heads)
    fall = rng.exponential(1.0 if decay == np.inf else decay, size=shape)
    if decay == np.inf:
        kinds = np.array([0.0, 1e-3, 1.0, 60.0, 1e6, np.inf])
        fall = kinds[rng.choice(6, size=shape, p=[0.3, 0.3, 0.2, 0.1, 0.05, 0.05])] * (1 + rng.random(shape))
    state = rng.normal(size=(batch, heads, key_dim, value_dim))
    return dict(zip(NAMES, (q, k, rng.normal(size=(*shape, value_dim)), -fall, rng.random(shape), state), strict=True))


def everything(x, implementation, dtype, mask=None, seed=1, mesh=None):
    """Outputs, final state, and the gradients of a weighted sum of both, by name, as float64; on a mesh or not."""
    rng = np.random.default_rng(seed)
    weights = [rng.normal(size=x[n].shape).astype(dtype) for n in ("v", "state")]
    given = {n: jnp.asarray(a, dtype) for n, a in x.items()}
    seen = 1 if mask is None else mask[..., None, None]

    def f(given):
        def total(given):
            out, state = gated_delta(**given, mask=mask, implementation=implementation)
            return jnp.sum(out * weights[0] * seen) + jnp.sum(state * weights[1]), (out * seen, state)

        return jax.value_and_grad(total, has_aux=True)(given)

    f = f if mesh is None else jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P())
    (_, (out, state)), grads = jax.jit(f)(given)
    found = {"out": out, "last": state, **{f"d_{n}": g for n, g in grads.items()}}
    return {n: np.asarray(a, np.float64) for n, a in found.items()}


def every_part(x, implementation, dtype, seed=1):
    """The parts, and the gradients of a weighted sum of all four."""
    rng = np.random.default_rng(seed)
    given = {n: jnp.asarray(a, dtype) for n, a in x.items() if n != "state"}

    @jax.jit
    def f(given):
        def total(given):
            parts = gated_delta_parts(**given, implementation=implementation)
            return sum(jnp.sum(p * rng.normal(size=p.shape).astype(dtype)) for p in parts), parts

        return jax.value_and_grad(total, has_aux=True)(given)

    (_, parts), grads = f(given)
    found = dict(zip(("out", "last", "reach", "transition"), parts, strict=True))
    found |= {f"d_{n}": g for n, g in grads.items()}
    return {n: np.asarray(a, np.float64) for n, a in found.items()}


def exact(x, mask=None):
    with jax.enable_x64(True):
        return everything(x, "reference", np.float64, mask)


def agree(got, want, tolerance):
    """Every result within the tolerance, relative to its largest element."""
    assert got.keys() == want.keys()
    errors = {n: np.abs(got[n] - want[n]).max() / max(np.abs(want[n]).max(), 1e-30) for n in want if want[n].size}
    assert all(np.isfinite(e) and e <= tolerance for e in errors.values()), errors
