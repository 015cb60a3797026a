"""Layers that hold a weight, its split, and the collective that the split asks for.

Everything here runs inside a `shard_map` with `check_vma=True`; annotated shapes are one device's. Weights keep
PyTorch's order, outputs before inputs, with heads as a dim of their own. A layer computes in the dtype of its input.

Between blocks the residual stream is either whole on every device of the tensor axes ("whole") or split along the
sequence over them ("seq"): the `residual` argument of `gather_residual` and of the row layers says which. "seq" moves
the same bytes (all-gather and reduce-scatter instead of one all-reduce) and keeps 1/tp of the stream and its norms.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from shardzoo.errors import InputError
from shardzoo.kernels.flash_attention.options import manual_axes, varying_over
from shardzoo.zoo.in_place import FEW, Stacked, rows_at, weight_first
from shardzoo.zoo.mesh import TP, traced_platform
from shardzoo.zoo.weights import Adapted, Leaf, Lora, Quantized, Weight

Residual = Literal["whole", "seq"]
WHOLE_STREAM: Residual = "whole"
SEQ = 1  # the sequence dim of (batch, seq, ...)


def gather_residual(x: Float[Array, "batch seq embed"], residual: Residual) -> Float[Array, "batch all_seq embed"]:
    """The stream as column layers need it: whole in the sequence over the tensor axes. "seq": one all-gather."""
    return lax.all_gather(x, TP, axis=SEQ, tiled=True) if residual == "seq" else x


def reduce_residual(partial: Float[Array, "batch seq ..."], residual: Residual) -> Float[Array, "batch part_seq ..."]:
    """Sums partial results over the tensor axes. "whole": one all-reduce; "seq": one reduce-scatter along seq."""
    if residual == "seq":
        return lax.psum_scatter(partial, TP, scatter_dimension=SEQ, tiled=True)
    return lax.psum(partial, TP)


def settled(x: Any) -> Any:
    """The arrays of x, which a TPU computes here and holds, rather than again within each step that reads them.

    Its compiler writes out cheap steps within all that read them, into large products too, and compiles each copy.
    Steps that read what is settled and are alike are compiled once. Other platforms fuse as they like.
    """
    return lax.optimization_barrier(x) if traced_platform() == "tpu" else x


def pad(x: Array, axis: int, ways: int) -> Array:
    """x with zeros added until this dim divides."""
    extra = [(0, -size % ways if dim == axis else 0) for dim, size in enumerate(x.shape)]
    return jnp.pad(x, extra) if extra[axis][1] else x


def check_residual(what: str, residual: str) -> None:
    """Refuses a form of the residual stream that there is not; `what` is asked for it.

    Raises:
        InputError: as said.
    """
    if residual not in ("whole", "seq"):
        raise InputError(f"{what}: residual={residual!r} is unknown: use 'whole' or 'seq'")


def own_share(x: Shaped[Array, "batch all_seq ..."], axes: tuple[str, ...]) -> Shaped[Array, "batch seq ..."]:
    """This device's share of a sequence that is whole on all devices of these axes and divides by them."""
    size = x.shape[SEQ] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, axis=SEQ)


_OVER_LAST = (((1,), (1,)), ((), ()))
_OVER_INNER = (((1,), (0,)), ((), ()))


@jax.custom_vjp
def narrow_product(rows: Float[Array, "rows in"], weight: Float[Array, "out in"]) -> Float[Array, "rows out"]:
    """rows . weight^T of 16-bit rows, in float32: in the one form that XLA for CPUs has of 16-bit products.

    It multiplies bfloat16 as it is, twice as fast as float32, if the sum goes over the last dim of the left side and
    the result is float32; else it widens copies of both sides. JAX's own gradients ask for 16-bit results, and for
    sums over the first dims of both sides. The weight's gradient is not rounded to 16 bits if the weight is wider.
    """
    return _narrow_forward(rows, weight)[0]


def _narrow_forward(rows: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    y = lax.dot_general(rows, weight.astype(rows.dtype), _OVER_LAST, preferred_element_type=jnp.float32)
    return y, (rows, weight)


def _narrow_backward(kept: tuple[Array, Array], d_y: Array) -> tuple[Array, Array]:
    rows, weight = kept
    d_y = d_y.astype(rows.dtype)
    d_rows = lax.dot_general(d_y, weight.astype(rows.dtype), _OVER_INNER, preferred_element_type=jnp.float32)
    # Transposed by hand, and as a row of numbers held back from the compiler, which else folds it into the product.
    turned = lax.optimization_barrier(d_y.T.reshape(d_y.size)).reshape(d_y.shape[::-1])
    d_weight = lax.dot_general(turned, rows, _OVER_INNER, preferred_element_type=jnp.float32)
    return d_rows.astype(rows.dtype), d_weight.astype(weight.dtype)


narrow_product.defvjp(_narrow_forward, _narrow_backward)


def unpacked(x: Float[Array, "batch seq block ..."]) -> tuple[Float[Array, "batch seq ..."], ...]:
    """The outputs of projections that are packed along a dim of their own (q, k and v; gate and up).

    On CPUs their gradients are put together as one concatenation: slices' are padded and added, in a loop of branches
    that is not vectorised.
    """
    if traced_platform() != "cpu":
        return tuple(x[:, :, block] for block in range(x.shape[2]))
    return tuple(lax.squeeze(part, (2,)) for part in lax.split(x, (1,) * x.shape[2], axis=2))


def in_float32(f: Callable[..., Array], *x: Float[Array, "..."]) -> Float[Array, "..."]:
    """f of these, which on CPUs computes 16-bit floats in float32 and rounds once.

    XLA for CPUs has no arithmetic of 16-bit floats: it rounds in between after every step, which is most of the work.
    Elsewhere f runs in their dtype.
    """
    if x[0].dtype.itemsize != 2 or traced_platform() != "cpu":
        return f(*x)
    return f(*(part.astype(jnp.float32) for part in x)).astype(x[0].dtype)


def exact_gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """gelu by the error function; `jax.nn.gelu` is that by tanh."""
    return jax.nn.gelu(x, approximate=False)


def gated(activation: Callable[[Array], Array], x: Float[Array, "batch seq two mlp"]) -> Float[Array, "batch seq mlp"]:
    """activation(gate) * up, of both packed."""
    return in_float32(lambda gate, up: activation(gate) * up, *unpacked(x))


def contract(
    x: Float[Array, "batch seq *in"], weight: Float[Weight, "*out_in"], inputs: int = 1, *, unrounded: bool = False
) -> Float[Array, "..."]:
    """x . weight over the last `inputs` dims of both, in x's dtype; sums in float32 at least.

    `unrounded` leaves what CPUs have of 16-bit floats in float32, for a caller that goes on in it and rounds once.

    The product is one of matrices: XLA for CPUs transposes a weight of more dims at every use. 16-bit floats go
    through `narrow_product` there. By few rows a wide weight is multiplied from the left, which XLA does not copy, and
    one that is still in the stack of all layers (`Stacked`) where it lies.

    A quantized weight is multiplied by as it is stored, and the outputs by its scales: before they are rounded, and
    before any reduction, so that partial sums of several weights add up and keep the range of the result. What
    adapters add is split like the product and as partial as it is: it joins whatever reduction follows.
    """
    if isinstance(weight, Adapted):
        added = [adapt(x, lora, inputs, unrounded=unrounded) for lora in weight.lora.values()]
        return sum(added, contract(x, weight.base, inputs, unrounded=unrounded))
    lead, out = x.shape[: x.ndim - inputs], weight.shape[: weight.ndim - inputs]
    width = math.prod(weight.shape[weight.ndim - inputs :])
    rows = x.reshape(math.prod(lead), width)
    quantized = isinstance(weight, Quantized)
    on_cpu = traced_platform() == "cpu"
    stored, few = weight.values if isinstance(weight, Quantized) else weight, on_cpu and len(rows) <= FEW
    by_hand = x.dtype.itemsize == 2 and on_cpu
    if isinstance(stored, Stacked) and few:
        y = stored.product(rows)
    else:
        stored = stored.read() if isinstance(stored, Stacked) else stored
        stored = stored if by_hand and not quantized else stored.astype(x.dtype)
        matrix = stored.reshape(math.prod(out), width)
        if by_hand:
            y = narrow_product(*varying_over((rows, matrix), manual_axes(rows) | manual_axes(matrix)))
        elif few and len(rows) > 1:
            y = weight_first(matrix, rows).T
        else:
            wide = jnp.float32 if x.dtype.itemsize == 2 and quantized else None
            y = lax.dot_general(rows, matrix, _OVER_LAST, preferred_element_type=wide)
    if isinstance(weight, Quantized):
        y = y * weight.scale.astype(y.dtype).reshape(1, math.prod(out))
    y = y if unrounded and by_hand else y.astype(x.dtype)
    return y.reshape(*lead, *out)


def adapt(
    x: Float[Array, "batch seq *in"], lora: Lora, inputs: int = 1, *, unrounded: bool = False
) -> Float[Array, "..."]:
    """What an adapter adds to x . weight: strength * ratio * B (A x), by the block where it has an A for each."""
    strength = (lora.ratio * lora.strength)[..., None]
    h = contract(x, lora.a, inputs)
    h = (h.astype(strength.dtype) * strength).astype(x.dtype)
    if lora.a.ndim - inputs == 1:
        return contract(h, lora.b, unrounded=unrounded)
    product = functools.partial(contract, unrounded=unrounded)
    return jax.vmap(product, (x.ndim - inputs, 0), x.ndim - inputs)(h, lora.b)


class ColumnLinear(eqx.Module):
    """y = W x + b with an output dim split over the tensor axes, or with nothing split. No collective.

    `y[B, S, *out_TP] = x[B, S, in] . W[*out_TP, in]`: y holds this device's outputs. Leading output dims that stay
    whole pack projections of equal size (q, k and v; gate and up).
    """

    weight: Float[Weight, "*out in"]
    bias: Float[Leaf, "*out"] | None = None

    def __call__(self, x: Float[Array, "batch seq in"], *, unrounded: bool = False) -> Float[Array, "batch seq *out"]:
        """`unrounded` as `contract` has it."""
        y = contract(x, self.weight, unrounded=unrounded)
        return y if self.bias is None else y + self.bias.astype(y.dtype)


class RowLinear(eqx.Module):
    """y = psum(W x) + b with an input dim split over the tensor axes; y is whole, b is added once, after the sum.

    `y[B, S, out] = psum_TP(x[B, S, *in_TP] . W[out, *in_TP]) + b[out]`
    """

    weight: Float[Weight, "out *in"]
    bias: Float[Leaf, " out"] | None = None

    def partial(self, x: Float[Array, "batch seq *in"]) -> Float[Array, "batch seq out"]:
        """This device's share of the sum, without the bias; unrounded, as `contract` has it."""
        return contract(x, self.weight, inputs=self.weight.ndim - 1, unrounded=True)

    def __call__(
        self, x: Float[Array, "batch seq *in"], residual: Residual = "whole"
    ) -> Float[Array, "batch part_seq out"]:
        return row_sum((self, x), residual=residual)


def row_sum(*parts: tuple[RowLinear, Array], residual: Residual = "whole") -> Float[Array, "batch part_seq out"]:
    """The sum of several row layers under one collective.

    This is a packed row projection, such as one weight over [attention, mlp], whose input blocks are split each by
    itself: `y = psum_TP(sum_i x_i . W_i) + sum_i b_i`.
    """
    total = sum(layer.partial(x) for layer, x in parts)
    y = reduce_residual(total, residual).astype(parts[0][1].dtype)
    for layer, _ in parts:
        if layer.bias is not None:
            y = y + layer.bias.astype(y.dtype)
    return y


class SplitInputLinear(eqx.Module):
    """y = psum(W x) + b for an x that is whole: each device takes its slice of x, as its split of W's inputs demands.

    For wide projections of a small input (modulation): the weight is split, and only the output is reduced.
    `y[B, S, *out] = psum_TP(x[B, S, in_TP] . W[*out, in_TP]) + b[*out]`; with the "seq" residual a reduce-scatter along
    seq in place of the psum.
    """

    weight: Float[Weight, "*out in"]
    bias: Float[Leaf, "*out"] | None = None

    def partial(self, x: Float[Array, "batch seq whole_in"]) -> Float[Array, "batch seq *out"]:
        """This device's share of the sum, without the bias."""
        size = self.weight.shape[-1]
        return contract(lax.dynamic_slice_in_dim(x, lax.axis_index(TP) * size, size, axis=-1), self.weight)

    def __call__(
        self, x: Float[Array, "batch seq whole_in"], residual: Residual = "whole"
    ) -> Float[Array, "batch part_seq *out"]:
        return self.finished(reduce_residual(self.partial(x), residual))

    def finished(self, total: Float[Array, "batch seq *out"]) -> Float[Array, "batch seq *out"]:
        """The sum of all devices' shares, with the bias."""
        return total if self.bias is None else total + self.bias.astype(total.dtype)


Linear = ColumnLinear | RowLinear | SplitInputLinear  # the layers whose weights may be quantized and adapted


class Embedding(eqx.Module):
    """Token embedding with the vocabulary split over `axis`, the tensor axes, and its transpose as output head.

    `__call__`: `y[B, S, embed] = psum_TP(W[vocab_TP, embed][ids])`, each row from the device that holds it; with the
    "seq" residual a reduce-scatter along seq in place of the psum.
    `logits`: `z[B, S, vocab_TP] = y[B, S, embed] . W[vocab_TP, embed]`; no collective, z stays split.
    With `axis=VOCAB` the vocabulary is split over `pipe` as well, and the sum goes over all of these axes.
    """

    weight: Float[Leaf, "vocab embed"]
    axis: tuple[str, ...] = eqx.field(static=True, default=TP)

    def __call__(
        self,
        ids: Int[Array, "batch seq"],
        dtype: jnp.dtype | None = None,
        residual: Residual = "whole",
        *,
        in_place: bool = False,
    ) -> Float[Array, "batch part_seq embed"]:
        """The stream in `dtype` (the weight's). `in_place` reads the table by `in_place.rows_at`: no gradient."""
        rows = self.weight.shape[0]
        local = ids - lax.axis_index(self.axis) * rows
        here = (local >= 0) & (local < rows)
        local = jnp.where(here, local, 0)
        found = rows_at(self.weight, local) if in_place else self.weight[local]
        y = jnp.where(here[..., None], found, 0)
        y = y if dtype is None else y.astype(dtype)
        if residual == "whole":
            return lax.psum(y, self.axis)
        others = tuple(axis for axis in self.axis if axis not in TP)
        y = reduce_residual(y, residual)
        return lax.psum(y, others) if others else y

    def logits(self, y: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq vocab"]:
        """One row of 16-bit floats goes through twice on a CPU: for a row alone XLA widens the whole table first."""
        if y.shape[:2] == (1, 1) and y.dtype.itemsize == 2 and traced_platform() == "cpu":
            return contract(jnp.concatenate([y, y], axis=SEQ), self.weight)[:, :1]
        return contract(y, self.weight)


class RMSNorm(eqx.Module):
    """x / rms(x) * weight over the weight's dims, float32 inside.

    With `axis`, one of those dims is split over these mesh axes and the mean square is averaged over them (one psum of
    one number per token). `offset` is added to the weight: 1 for weights stored around zero, which are multiplied by in
    float32.
    """

    weight: Float[Leaf, "*norm"]
    eps: float = eqx.field(static=True, default=1e-6)
    axis: tuple[str, ...] | None = eqx.field(static=True, default=None)
    offset: float = eqx.field(static=True, default=0.0)

    def mean_square(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """This device's mean of x^2 over the normed dims, which are kept with size 1."""
        return jnp.mean(jnp.square(x.astype(jnp.float32)), axis=tuple(range(-self.weight.ndim, 0)), keepdims=True)

    def scale(
        self, x: Float[Array, "..."], mean_square: Float[Array, "..."], weight: Float[Array, "..."] | None = None
    ) -> Float[Array, "..."]:
        weight = self.weight if weight is None else weight
        y = x.astype(jnp.float32) * lax.rsqrt(mean_square + self.eps)
        if self.offset:  # the sum needs more digits than a 16-bit weight has
            return (y * (weight.astype(jnp.float32) + self.offset)).astype(x.dtype)
        return y.astype(x.dtype) * weight.astype(x.dtype)

    def __call__(self, x: Float[Array, "..."], weight: Float[Array, "..."] | None = None) -> Float[Array, "..."]:
        """x, normed; with this `weight` in place of its own, of more dims where norms alike stand side by side."""
        mean = self.mean_square(x)
        return self.scale(x, lax.pmean(mean, self.axis) if self.axis else mean, weight)


def norm_together(*pairs: tuple[RMSNorm, Array]) -> list[Array]:
    """Several norms across the same split dims (q and k over all heads) with one psum for all of them."""
    axes = {norm.axis for norm, _ in pairs}
    if len(axes) != 1 or None in axes:
        raise ValueError(f"norm_together: the norms are split over {axes}: give each the same mesh axes")
    means = [norm.mean_square(x) for norm, x in pairs]
    reduced = lax.pmean(tuple(means), axes.pop())
    return [norm.scale(x, mean) for (norm, x), mean in zip(pairs, reduced, strict=True)]


class LayerNorm(eqx.Module):
    """(x - mean) / std * weight + bias over the last dim, float32 inside; weight and bias may be absent."""

    weight: Float[Leaf, " embed"] | None = None
    bias: Float[Leaf, " embed"] | None = None
    eps: float = eqx.field(static=True, default=1e-6)

    def __call__(self, x: Float[Array, "*lead embed"]) -> Float[Array, "*lead embed"]:
        x32 = x.astype(jnp.float32)
        centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        y = centred * lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + self.eps)
        y = y if self.weight is None else y * self.weight.astype(jnp.float32)
        y = y if self.bias is None else y + self.bias.astype(jnp.float32)
        return y.astype(x.dtype)
