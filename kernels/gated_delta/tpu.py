"""The gated delta rule on TPU: hand-written Pallas (Mosaic) kernels, forward and backward.

Nothing here has run on a TPU yet. What is known of it: its numbers from Pallas' TPU interpreter, and, from the TPU
compiler, which needs no TPU, that it compiles and how many instruction bundles it takes (`benchmarks/gated_delta_tpu`).

The state is float32 in VMEM for a whole sequence. Float32 values are multiplied with all their bits. Beside values in
bfloat16 the operands of products are rounded to bfloat16 (keys and queries too), sums stay float32, and the inverse in
a chunk is corrected to about 16 bits. Head sizes are filled up with zeros to whole lanes (128).

The parts (see `gated_delta_parts`) are columns beside the values: a state widened by the identity, values by zeros.
"""

from jaxtyping import Array, Float

from shardzoo.kernels.gated_delta import tpu_backward, tpu_forward
from shardzoo.kernels.gated_delta.options import Call, Result, backward_of, cut, result_dtype, with_identity
from shardzoo.kernels.gated_delta.tpu_layout import arrays_of, from_lanes, lanes_of, plan_of, state_of, whole_lanes

DTYPES = ("float32", "bfloat16")
LARGEST_KEY_DIM, LARGEST_COLUMNS = 256, 512
# Elements of a key head's states, by the bytes of a value: what the least VMEM (v4, v5p) holds beside all else.
LARGEST_STATES = {2: 3 * 256 * 512, 4: 2 * 256 * 256}


def supports(call: Call, *, parts: bool) -> str | None:
    """Why the kernels cannot take the call; None when they can."""
    key_dim, columns = call.k.shape[-1], call.v.shape[-1] + (call.k.shape[-1] if parts else 0)
    for name, x in (("q", call.q), ("k", call.k), ("v", call.v)):
        if str(x.dtype) not in DTYPES:
            return f"the dtype {x.dtype} of {name} is none of {', '.join(DTYPES)}"
    if key_dim > LARGEST_KEY_DIM:
        return f"its key_dim={key_dim} is over {LARGEST_KEY_DIM}"
    if columns > LARGEST_COLUMNS:
        return f"its {columns} columns of values and parts are over {LARGEST_COLUMNS}"
    if any(x.size == 0 for x in call):
        return "it has no elements"
    states = call.v.shape[3] * whole_lanes(key_dim) * whole_lanes(columns)
    if states > LARGEST_STATES[call.v.dtype.itemsize]:
        return f"the states of a key head's {call.v.shape[3]} value heads, {key_dim} x {columns} each, are too large"
    return None


def run(call: Call, scale: float, *, parts: bool) -> Result:
    """Outputs and final state, with the parts if asked for."""
    dtype, width = result_dtype(call, parts=parts), call.v.shape[-1]
    whole = with_identity(call) if parts else call
    plan = plan_of("forward", whole, scale)
    out, state = tpu_forward.run(plan, arrays_of(plan, whole), dtype)
    out, state = from_lanes(out, whole.v), _from_state(state, whole.state)
    return cut(out, state, width) if parts else Result(out, state)


def backward(call: Call, scale: float, change: Result, *, parts: bool) -> Call:
    """Gradients of the call from those of its result."""
    return backward_of(_backward, call, scale, change, parts=parts)


def _backward(
    call: Call,
    scale: float,
    d_out: Float[Array, "batch seq key_heads group value_dim"],
    d_state: Float[Array, "batch key_heads group key_dim value_dim"],
) -> Call:
    plan = plan_of("backward", call, scale)
    x = arrays_of(plan, call)
    d_out = lanes_of(d_out.astype(x.v.dtype), plan.value_dim)
    dtypes = call.q.dtype, call.k.dtype, call.v.dtype
    found = tpu_backward.run(plan, x, tpu_backward.states(plan, x), d_out, state_of(plan, d_state), dtypes)
    log_decay, beta = tpu_backward.gate_gradients(plan, found.gates)
    return Call(
        q=from_lanes(found.q, call.q),
        k=from_lanes(found.k, call.k),
        v=from_lanes(found.v, call.v),
        log_decay=log_decay.reshape(call.log_decay.shape),
        beta=beta.reshape(call.beta.shape),
        state=_from_state(found.state, call.state),
    )


def _from_state(x: Float[Array, "batch heads key_dim value_dim"], like: Array) -> Array:
    """Without what `state_of` filled up."""
    return x[..., : like.shape[-2], : like.shape[-1]].reshape(like.shape)
