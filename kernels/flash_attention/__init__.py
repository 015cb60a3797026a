"""Attention in memory linear in the length: one function, one implementation per platform.

    out = flash_attention(q, k, v, causal=True, kv_lengths=lengths)
    which_implementation(q, k, v, causal=True, kv_lengths=lengths)

`reference` is the definition, `blockwise` runs on every platform, `tpu` and `gpu` are hand-written Pallas
kernels. Without a named implementation the platform's kernel runs if it takes the call, else `blockwise`.
"""

from beartype import beartype
from jaxtyping import Array, Float, Int, jaxtyped

from shardzoo.kernels.flash_attention.arguments import prepare
from shardzoo.kernels.flash_attention.attend import attend
from shardzoo.kernels.flash_attention.choice import Choice, choose, here, named_plan, plan_for
from shardzoo.kernels.flash_attention.merge import merge
from shardzoo.kernels.flash_attention.options import Extras, Shaped

__all__ = ["Choice", "flash_attention", "merge", "which_implementation"]


@jaxtyped(typechecker=beartype)
def flash_attention(
    q: Float[Array, "batch q_len heads head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"],
    v: Float[Array, "batch kv_len kv_heads head_dim"],
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | int | None = None,
    soft_cap: float | int | None = None,
    q_lengths: Int[Array, " batch"] | None = None,
    kv_lengths: Int[Array, " batch"] | None = None,
    q_segment_ids: Int[Array, "batch q_len"] | None = None,
    kv_segment_ids: Int[Array, "batch kv_len"] | None = None,
    bias: Float[Array, "bias_batch bias_heads q_len kv_len"] | None = None,
    q_offset: int | Int[Array, ""] | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> (
    Float[Array, "batch q_len heads head_dim"]
    | tuple[Float[Array, "batch q_len heads head_dim"], Float[Array, "batch q_len heads"]]
):
    """softmax(bias + cap(scale * q . k)) . v, differentiable in q, k, v and bias, with no array q_len x kv_len.

    Query head h reads KV head h // (heads / kv_heads). Sums are in float32 (float64 for float64 input), the
    output is in q's dtype. Logits have to be finite in float32, but for a bias of -inf. A query that sees no
    key gives zeros, an lse of -inf and zero gradients. Under jax.checkpoint the policy
    save_only_these_names("attention_out", "attention_lse") keeps what the backward pass needs of the forward one.

    Args:
        q, k, v: one dtype: float32 or bfloat16 on every implementation (float16, float64: those that
            `which_implementation` names).
        causal: query i sees keys j <= i + q_offset.
        window: w: query i sees keys j > i + q_offset - w and, if not causal, j < i + q_offset + w.
        scale: of q . k; None is 1 / sqrt(head_dim).
        soft_cap: c: logits become c * tanh(logits / c), before the bias is added.
        q_lengths, kv_lengths: the valid prefix of each row; queries beyond it give zeros.
        q_segment_ids, kv_segment_ids: a query sees the keys of its own id.
        bias: (1 or batch, 1 or heads, q_len, kv_len), added to the logits; -inf hides a key.
        q_offset: the position of the first query relative to the first key, a number or a traced scalar;
            None is kv_len - q_len, which puts the last query at the last key.
        return_lse: also return the log-sum-exp of the logits (batch, q_len, heads), natural log, at least
            float32: what `merge` needs to join the results of several key shards.
        implementation: "reference", "blockwise", "tpu", "gpu"; None is the best for the platform.

    Raises:
        InputError: sizes or options that contradict each other, or a named implementation that cannot take
            the call (the message names those that can).
    """
    extras, options = prepare(
        q,
        k,
        v,
        causal=causal,
        window=window,
        scale=None if scale is None else float(scale),
        soft_cap=None if soft_cap is None else float(soft_cap),
        q_offset=q_offset,
        arrays=Extras(None, q_lengths, kv_lengths, q_segment_ids, kv_segment_ids, bias),
    )
    if implementation is None:
        plan = plan_for(q, k, v, extras, options)
    else:
        plan = named_plan(implementation, q, k, v, extras, options)
    out, lse = attend(plan, q, k, v, extras, options)
    return (out, lse.swapaxes(1, 2)) if return_lse else out


def which_implementation(
    q: Shaped,
    k: Shaped,
    v: Shaped,
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    q_lengths: Shaped | None = None,
    kv_lengths: Shaped | None = None,
    q_segment_ids: Shaped | None = None,
    kv_segment_ids: Shaped | None = None,
    bias: Shaped | None = None,
    q_offset: int | Shaped | None = None,
    platform: str | None = None,
) -> Choice:
    """The implementation that `flash_attention` runs for these arguments, and why; computes nothing.

    Args:
        q, k, v and the others: as for `flash_attention`, arrays or ShapeDtypeStructs.
        platform: "cpu", "tpu", "cuda" or "rocm"; None is the one that a call made now would run on.

    Raises:
        InputError: as `flash_attention`.
    """
    extras, options = prepare(
        q,
        k,
        v,
        causal=causal,
        window=window,
        scale=scale,
        soft_cap=soft_cap,
        q_offset=q_offset,
        arrays=Extras(None, q_lengths, kv_lengths, q_segment_ids, kv_segment_ids, bias),
    )
    return choose(platform or here(), q, k, v, extras, options)
