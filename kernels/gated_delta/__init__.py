"""The gated delta rule (Gated DeltaNet): attention whose memory is one matrix a head, of a fixed size.

    out, state = gated_delta(q, k, v, log_decay, beta, state=state)

`reference` is the definition, token by token; `chunked` does the same work on matrices of a chunk of tokens, on every
platform. `gated_delta_parts` also says how outputs and final state depend on the initial state, which a sequence that
is split over devices needs: its shards run at once, and learn of the state before them afterwards.
"""

import importlib

from beartype import beartype
from jaxtyping import Array, Bool, Float, jaxtyped

from shardzoo.errors import InputError
from shardzoo.kernels.gated_delta.arguments import prepare
from shardzoo.kernels.gated_delta.options import Call, Result

__all__ = ["IMPLEMENTATIONS", "gated_delta", "gated_delta_parts", "which_implementation"]

IMPLEMENTATIONS = ("reference", "chunked")


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
    scale: float | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "batch seq heads value_dim"], Float[Array, "batch heads key_dim value_dim"]]:
    """S = exp(log_decay) S; S += k (beta (v - S^T k))^T; out = S^T (scale q), token by token; out and the last S.

    Value head h reads key head h // (heads / key_heads). Differentiable in all arrays but the mask. The state and all
    that is computed are float32 (float64 for float64 values); out is in v's dtype. For the rule to be stable keys have
    norm at most 1 and beta is in [0, 2]; with any others it is computed as it stands.

    Args:
        q, k: of any norm: nothing is normalised here.
        log_decay: natural logarithm of the decay, at most 0; -inf forgets everything before the token.
        beta: how much of what the state holds for the key is replaced.
        state: before the first token; None is zeros.
        mask: False for tokens that leave the state as it is, for padding on any side; their outputs mean nothing.
        scale: of q; None is 1 / sqrt(key_dim).
        implementation: "reference" or "chunked"; None is what `which_implementation` names.

    Raises:
        InputError: sizes that contradict each other, or an unknown implementation.
    """
    call = prepare(q, k, v, log_decay, beta, state=state, mask=mask, scale=scale)
    result = _run(call, implementation, parts=False)
    return result.out.reshape(v.shape).astype(v.dtype), _by_head(result.state)


@jaxtyped(typechecker=beartype)
def gated_delta_parts(
    q: Float[Array, "batch seq key_heads key_dim"],
    k: Float[Array, "batch seq key_heads key_dim"],
    v: Float[Array, "batch seq heads value_dim"],
    log_decay: Float[Array, "batch seq heads"],
    beta: Float[Array, "batch seq heads"],
    *,
    mask: Bool[Array, "batch seq"] | None = None,
    scale: float | None = None,
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
    call = prepare(q, k, v, log_decay, beta, state=None, mask=mask, scale=scale)
    result = _run(call, implementation, parts=True)
    reach = result.reach.reshape(*v.shape[:3], k.shape[-1])
    return result.out.reshape(v.shape), _by_head(result.state), reach, _by_head(result.transition)


def which_implementation(seq: int) -> str:
    """The implementation that runs for sequences of this length: a single token is one step of the definition."""
    return "reference" if seq == 1 else "chunked"


def _run(call: Call, implementation: str | None, *, parts: bool) -> Result:
    name = which_implementation(call.v.shape[1]) if implementation is None else implementation
    if name not in IMPLEMENTATIONS:
        known = " or ".join(repr(n) for n in IMPLEMENTATIONS)
        raise InputError(f"gated_delta: implementation={name!r} is unknown: use {known}, or None")
    return importlib.import_module(f"{__package__}.{name}").run(call, parts=parts)


def _by_head(x: Float[Array, "batch key_heads group rows columns"]) -> Float[Array, "batch heads rows columns"]:
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])
