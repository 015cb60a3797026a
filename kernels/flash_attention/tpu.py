"""Attention on TPU: hand-written Pallas (Mosaic) kernels, forward and backward.

Nothing here has run on a TPU yet. What is known of it comes from three other places: its numbers from Pallas' TPU
interpreter, against float64; that it compiles for v4, v5e, v5p, v6e and 7x, and how many instruction bundles the
compiler schedules for it, from the TPU compiler, which needs no TPU; and, by arithmetic, that memory keeps up.
`benchmarks/attention_tpu.py` prints the schedules beside those of the kernels that JAX ships.

How the work per logit is kept small:
 - logits are held (keys, queries), so that maxima and sums run over sublanes and a query's terms broadcast for free;
 - the scale and log2(e) are folded into the queries once, and exponentials are in base 2;
 - only blocks that an end, a band or a segment cuts through are masked; blocks that nothing is seen of are neither
   computed nor fetched; where only the array's end hides keys, a single tile of keys is masked;
 - the output is divided by its sum once, after the last key;
 - tiles are worked on in an order that gives the matrix unit the next tile while the vector units are on this one;
 - the backward pass makes dq, dk and dv from the same logits (see `tpu_backward`).

In bfloat16 the folded queries are rounded once more, which leaves logits (and the lse) 8 significant bits; outputs
are as accurate as those of JAX's splash kernel, which takes queries that its caller has scaled and rounded.

With a head_dim of whole lanes (a multiple of 128) heads are cut out of (batch, length, heads * head_dim) by the
kernel's own indexing; other sizes are moved to (batch, heads, length, head_dim) first.
"""

import jax
from jaxtyping import Array, Float

from shardzoo.kernels.flash_attention import tpu_backward, tpu_bias, tpu_forward
from shardzoo.kernels.flash_attention.options import Extras, Options, sizes
from shardzoo.kernels.flash_attention.tpu_blocks import WIDEST, call_of

DTYPES = ("float32", "bfloat16")


def supports(
    q: Array | jax.ShapeDtypeStruct,
    k: Array | jax.ShapeDtypeStruct,
    v: Array | jax.ShapeDtypeStruct,
    extras: Extras,
    options: Options,
) -> str | None:
    """Takes every call in float32 and bfloat16 up to the head_dim that a block of 128 rows leaves VMEM for."""
    if str(q.dtype) not in DTYPES:
        return f"its dtype {q.dtype} is none of {', '.join(DTYPES)}"
    if q.shape[3] > WIDEST:
        return f"its head_dim={q.shape[3]} is over {WIDEST}"
    return None


def forward(
    q: Float[Array, "batch q_len heads head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"],
    v: Float[Array, "batch kv_len kv_heads head_dim"],
    extras: Extras,
    options: Options,
) -> tuple[Float[Array, "batch q_len heads head_dim"], Float[Array, "batch heads q_len"]]:
    """Output and log-sum-exp. float32 inside; the weights are rounded to q's dtype for the matrix unit."""
    call = call_of("forward", sizes(q, k), q.dtype.itemsize, extras, options)
    return tpu_forward.run(call, q, k, v, extras)


def backward(
    q: Float[Array, "batch q_len heads head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"],
    v: Float[Array, "batch kv_len kv_heads head_dim"],
    extras: Extras,
    options: Options,
    out: Float[Array, "batch q_len heads head_dim"],
    lse: Float[Array, "batch heads q_len"],
    d_out: Float[Array, "batch q_len heads head_dim"],
    d_lse: Float[Array, "batch heads q_len"],
) -> tuple[Array, Array, Array, Array | None]:
    """Gradients of q, k, v and the bias. float32 inside; what the matrix unit multiplies is rounded to q's dtype."""
    call = call_of("backward", sizes(q, k), q.dtype.itemsize, extras, options)
    d_out = d_out.astype(q.dtype)
    terms = tpu_backward.row_terms(call, out, lse, d_out, d_lse)
    gradients = tpu_backward.run(call, q, k, v, extras, d_out, *terms)
    if extras.bias is None or not options.bias_gradient:
        return *gradients, None
    call = call_of("bias", sizes(q, k), q.dtype.itemsize, extras, options)
    terms = tpu_backward.row_terms(call, out, lse, d_out, d_lse)
    return *gradients, tpu_bias.run(call, q, k, v, extras, d_out, *terms)
