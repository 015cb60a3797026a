"""The differentiation rule shared by all implementations, and the choice between them when lowering."""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jaxtyping import Array, Float

from shardzoo.kernels.flash_attention import reference
from shardzoo.kernels.flash_attention.choice import Plan, module
from shardzoo.kernels.flash_attention.options import (
    Extras,
    Options,
    accumulator,
    manual_axes,
    varying_like,
    varying_over,
)

# What a policy of jax.checkpoint saves these by, so that the backward pass does not run the forward kernel again.
OUT_NAME, LSE_NAME = "attention_out", "attention_lse"


def attend(
    plan: Plan,
    q: Float[Array, "batch q_len heads head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"],
    v: Float[Array, "batch kv_len kv_heads head_dim"],
    extras: Extras,
    options: Options,
) -> tuple[Float[Array, "batch q_len heads head_dim"], Float[Array, "batch heads q_len"]]:
    """Runs the plan on a checked call.

    Inside a shard_map the arrays may vary over different mesh axes. They are first made to vary over the union:
    the transpose of that step sums a gradient over the axes that its array does not vary over, so the rule
    below and every implementation see one type only.
    """
    arrays = (q, k, v, extras)
    axes = frozenset().union(*(manual_axes(x) for x in jax.tree.leaves(arrays)))
    q, k, v, extras = varying_over(arrays, axes)
    batch, q_len, heads, _ = q.shape
    if 0 in q.shape or 0 in k.shape:
        lse = jnp.full((batch, heads, q_len), -jnp.inf, accumulator(q.dtype))
        return varying_like((jnp.zeros(q.shape, q.dtype), lse), q)
    if plan == (("default", "reference"),):
        # The definition is differentiable as it stands, also forwards and twice.
        return reference.forward(q, k, v, extras, options)
    return _attend(plan, options, q, k, v, extras)


def _run(plan: Plan, options: Options, step: str, *arrays: Array | Extras) -> tuple[Array | None, ...]:
    """The step, "forward" or "backward", of the implementation for the platform that is lowered for."""

    def branch(name: str):
        def call(q, k, v, extras, *rest):
            return getattr(module(name), step)(q, k, v, extras, options, *rest)

        return call

    *special, (_, default) = plan
    if not special:
        return branch(default)(*arrays)
    special = {platform: branch(name) for platform, name in special}
    return lax.platform_dependent(*arrays, default=branch(default), **special)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(plan: Plan, options: Options, q: Array, k: Array, v: Array, extras: Extras) -> tuple[Array, Array]:
    return _run(plan, options, "forward", q, k, v, extras)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Wanted:
    """Whether the gradient of the bias is asked for: it is an array as large as the bias, and work to fill."""

    bias: bool


def _attend_forward(plan: Plan, options: Options, *primals: CustomVJPPrimal | Extras):
    q, k, v, extras = jax.tree.map(lambda x: x.value, primals, is_leaf=_is_primal)
    bias = primals[3].bias
    out, lse = _run(plan, options, "forward", q, k, v, extras)
    out, lse = checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)
    wanted = _Wanted(bias is not None and bias.perturbed)
    return (out, lse), (wanted, q, k, v, extras, out, lse)


def _is_primal(x: object) -> bool:
    return isinstance(x, CustomVJPPrimal)


def _attend_backward(plan: Plan, options: Options, residuals: tuple, cotangents: tuple):
    wanted, q, *rest = residuals
    given = [varying_like(jnp.zeros(x.shape, x.dtype), q) if isinstance(x, SymbolicZero) else x for x in cotangents]
    options = replace(options, bias_gradient=wanted.bias)
    dq, dk, dv, dbias = _run(plan, options, "backward", q, *rest, *given)
    return dq, dk, dv, Extras(bias=dbias if wanted.bias else None)


_attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)
