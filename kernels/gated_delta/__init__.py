"""The gated delta rule (Gated DeltaNet): attention whose memory is one matrix a head, of a fixed size.

    out, state = gated_delta(q, k, v, log_decay, beta, state=state)

`reference` is the definition, token by token; `chunked` does the same work on matrices of a chunk of tokens, on every
platform; `tpu` and `gpu` are hand-written Pallas kernels that do so. Without a named implementation the platform's
kernel runs if it takes the call, else `chunked`. `gated_delta_parts` also says how outputs and final state depend on
the initial state, which a sequence that is split over devices needs: its shards run at once, and learn of the state
before them afterwards.
"""

import jax
import jax.numpy as jnp
from beartype import beartype
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, jaxtyped

from shardzoo.kernels.flash_attention.choice import here
from shardzoo.kernels.gated_delta.arguments import prepare
from shardzoo.kernels.gated_delta.choice import IMPLEMENTATIONS, choose, named_plan, plan_for, run
from shardzoo.kernels.gated_delta.options import Call, Result

__all__ = ["IMPLEMENTATIONS", "gated_delta", "gated_delta_parts", "which_implementation"]


@jaxtyped(typechecker=beartype)
def gated_delta(
    q: Float[Array, "batch seq key_heads key_dim"],
    k: Float[Array, "batch seq key_heads key_dim"],
    v: Float[Array, "batch seq heads value_dim"],
    log_decay: Float[Array, "batch seq heads"],
    beta: Float[Array, "batch seq heads"],
    *,
    state: Float[Array, "batch heads key_dim value_dim"] | None = None,
    mask: Bool[Array, "batch seq"] | None = None,
    scale: float | int | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "batch seq heads value_dim"], Float[Array, "batch heads key_dim value_dim"]]:
    """S = exp(log_decay) S; S += k (beta (v - S^T k))^T; out = S^T (scale q), token by token; out and the last S.

    Value head h reads key head h // (heads / key_heads). Differentiable in all arrays but the mask. The state and all
    sums are float32 (float64 for float64 values); out is in v's dtype. Beside values in bfloat16 the kernels round what
    the matrix unit multiplies to bfloat16; the others compute in float32. For the rule to be stable keys have norm at
    most 1 and beta is in [0, 2]; with any others it is computed as it stands.

    Args:
        q, k: of any norm: nothing is normalised here.
        log_decay: natural logarithm of the decay, at most 0; -inf forgets everything before the token.
        beta: how much of what the state holds for the key is replaced.
        state: before the first token; None is zeros.
        mask: False for tokens that leave the state as it is, for padding on any side; their outputs mean nothing.
        scale: of q; None is 1 / sqrt(key_dim).
        implementation: "reference", "chunked", "tpu" or "gpu"; None is what `which_implementation` names.

    Raises:
        InputError: sizes that contradict each other, or a named implementation that is unknown or cannot take the call.
    """
    call = prepare(q, k, v, log_decay, beta, state=state, mask=mask)
    result = _run(call, scale, implementation, parts=False)
    return result.out.reshape(v.shape), _by_head(result.state)


@jaxtyped(typechecker=beartype)
def gated_delta_parts(
    q: Float[Array, "batch seq key_heads key_dim"],
    k: Float[Array, "batch seq key_heads key_dim"],
    v: Float[Array, "batch seq heads value_dim"],
    log_decay: Float[Array, "batch seq heads"],
    beta: Float[Array, "batch seq heads"],
    *,
    mask: Bool[Array, "batch seq"] | None = None,
    scale: float | int | None = None,
    implementation: str | None = None,
) -> tuple[
    Float[Array, "batch seq heads value_dim"],
    Float[Array, "batch heads key_dim value_dim"],
    Float[Array, "batch seq heads key_dim"],
    Float[Array, "batch heads key_dim key_dim"],
]:
    """What `gated_delta` computes, as a function of the initial state S: (out, state, reach, transition).

    The outputs are `out + reach . S`, the final state is `state + transition . S`. All are float32 (float64 for
    float64 values), the output not yet in v's dtype. Arguments and errors are those of `gated_delta`.
    """
    call = prepare(q, k, v, log_decay, beta, state=None, mask=mask)
    result = _run(call, scale, implementation, parts=True)
    reach = result.reach.reshape(*v.shape[:3], k.shape[-1])
    return result.out.reshape(v.shape), _by_head(result.state), reach, _by_head(result.transition)


def which_implementation(
    seq: int,
    *,
    dtype: DTypeLike = jnp.float32,
    key_dim: int = 128,
    value_dim: int = 128,
    group: int = 1,
    parts: bool = False,
    platform: str | None = None,
) -> str:
    """The implementation that runs for sequences of this length: a single token is one step of the definition.

    Args:
        dtype: of q, k and v.
        group: value heads for each key head.
        parts: of `gated_delta_parts` rather than `gated_delta`.
        platform: "cpu", "tpu", "cuda" or "rocm"; None is the one that a call made now would run on.
    """
    shapes = [(1, seq, 1, key_dim)] * 2 + [(1, seq, 1, group, value_dim)] + [(1, seq, 1, group)] * 2
    arrays = [jax.ShapeDtypeStruct(s, dtype) for s in [*shapes, (1, 1, group, key_dim, value_dim)]]
    return choose(platform or here(), Call(*arrays), parts=parts)


def _run(call: Call, scale: float | int | None, implementation: str | None, *, parts: bool) -> Result:
    plan = plan_for(call, parts=parts) if implementation is None else named_plan(implementation, call, parts=parts)
    return run(plan, call, call.k.shape[-1] ** -0.5 if scale is None else float(scale), parts=parts)


def _by_head(x: Float[Array, "batch key_heads group rows columns"]) -> Float[Array, "batch heads rows columns"]:
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])
