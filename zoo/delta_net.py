"""Gated DeltaNet: a token mixer with a state of fixed size. Heads over the tensor axes, the sequence over `context`.

Source: the class Qwen3_5GatedDeltaNet of transformers 5; the rule itself is `kernels/gated_delta`.

A sequence that is split is scanned by all shards at once. Each shard works out what it does to a state it does not know
yet, a linear map for each head: (transition, state), of a size that does not depend on the length. One all-gather
brings these summaries to every shard, which puts those before its own together, and corrects its outputs by what the
state that arrives adds to them. The convolution needs the few tokens before the shard: one collective-permute.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import P, lax
from jaxtyping import Array, Bool, Float, Int, Num

from shardzoo.kernels.flash_attention.options import varying_like, varying_over
from shardzoo.kernels.gated_delta import gated_delta, gated_delta_parts
from shardzoo.zoo import layout
from shardzoo.zoo.in_place import block_at, from_storage, to_storage
from shardzoo.zoo.layers import WHOLE_STREAM, ColumnLinear, Residual, RowLinear
from shardzoo.zoo.layout import Param
from shardzoo.zoo.mesh import CONTEXT, DATA, PIPE, TP, traced_platform
from shardzoo.zoo.weights import Leaf

SEQ = 1
L2_EPS = 1e-6  # under the root of the norms of queries and keys
# Tokens of all rows that a CPU takes through a layer at a time: what the layer makes of them stays in its cache.
CPU_PIECE = 1024
CPU_STEP = 64  # pieces are of so many tokens of each row, or of a multiple of it: of whole chunks of the rule


class Sizes(NamedTuple):
    """Key heads (queries have as many), value heads, their widths, taps of the convolution, and eps of the norm."""

    embed: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    eps: float


class Recurrent(NamedTuple):
    """What a layer keeps of the tokens so far: inputs of the convolution, flat, and the state of each head.

    Of all layers, as loops carry it, both have a leading dim for the layer, and a 16-bit tail is stored as integers on
    a CPU (`in_place.py`).
    """

    tail: Num[Array, "*layer batch before channels"]
    state: Float[Array, "*layer batch value_heads key_dim value_dim"]

    def write(
        self, layer: Int[Array, ""], one: "Recurrent", here: Bool[Array, ""] | None = None, last: Array | None = None
    ) -> "Recurrent":
        """That of all layers with one of them replaced, in place; unchanged where not `here`.

        `last` is a result of all that reads what is replaced. On CPUs it is waited for: XLA reads the old state again
        wherever it is used, and copies that of all layers, twice a layer, where the new one could come before that.
        """
        stored = one._replace(tail=to_storage(one.tail))
        if here is not None:
            stored = jax.tree.map(lambda x, old: jnp.where(here, x, old), stored, block_at(self, layer))
        waits = last is not None and traced_platform() == "cpu"
        at = layout.after(layer, last) if waits else layer
        state = lax.dynamic_update_index_in_dim(self.state, stored.state, at, 0)
        at = layout.after(layer, state) if waits else layer  # the new state is made of the old tail
        return Recurrent(lax.dynamic_update_index_in_dim(self.tail, stored.tail, at, 0), state)

    def read(self, layer: Int[Array, ""], dtype: jnp.dtype) -> "Recurrent":
        """That of one layer."""
        one = block_at(self, layer)
        return one._replace(tail=from_storage(one.tail, dtype))


# Every device of `context` keeps the whole of it: a decode step feeds the same token on all of them.
RECURRENT_SPECS = Recurrent(tail=P(PIPE, DATA, None, TP), state=P(PIPE, DATA, TP))


class Mixed(NamedTuple):
    """What a layer projects out of the stream; `qkv` is q, k and v of this device's heads, flat, one after another."""

    qkv: Float[Array, "batch seq channels"]
    gate: Float[Array, "batch seq value_heads value_dim"]
    beta: Float[Array, "batch seq value_heads"]
    log_decay: Float[Array, "batch seq value_heads"]


class GatedNorm(eqx.Module):
    """x / rms(x) * weight * silu(gate) for each head, the rms and the gate in float32."""

    weight: Float[Leaf, " value_dim"]
    eps: float = eqx.field(static=True, default=1e-6)

    def __call__(
        self, x: Float[Array, "batch seq value_heads value_dim"], gate: Float[Array, "batch seq value_heads value_dim"]
    ) -> Float[Array, "batch seq value_heads value_dim"]:
        wide = x.astype(jnp.float32)
        normed = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        weighted = normed.astype(x.dtype) * self.weight.astype(x.dtype)
        return (weighted.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)


class DeltaNet(eqx.Module):
    """The mixer: x whole in embed, output whole again; everything between is one device's heads.

    q, k: `qk[B, S, 2, G_TP, K] = x[B, S, E] . Wqk[2, G_TP, K, E]`; v, the gate, beta and the decay likewise for the
    value heads. Value head h reads key head h // (value_heads / key_heads), which the same split puts on the same
    device. `y[B, S, E] = psum_TP(o[B, S, H_TP, V] . Wo[E, H_TP, V])` is the only collective over the tensor axes.
    Over `context`: one collective-permute of the last taps - 1 tokens (several where a shard is shorter than that),
    one all-gather of key_dim x (key_dim + value_dim) float32 numbers a head; `prefill` adds an all-reduce of the tail.
    """

    qk: ColumnLinear
    vz: ColumnLinear
    ba: ColumnLinear
    conv_qk: Float[Leaf, "block key_heads key_dim taps"]
    conv_v: Float[Leaf, "value_heads value_dim taps"]
    a_log: Float[Leaf, " value_heads"]
    dt_bias: Float[Leaf, " value_heads"]
    norm: GatedNorm
    out: RowLinear

    @classmethod
    def declare(cls, s: Sizes) -> "DeltaNet":
        keys, values = (2, s.key_heads, s.key_dim), (s.value_heads, s.value_dim)
        by_key, by_value = {"key_heads": TP}, {"value_heads": TP}
        heads = (s.value_heads,)
        return cls(
            qk=ColumnLinear(Param("block key_heads key_dim embed", (*keys, s.embed), by_key)),
            vz=ColumnLinear(Param("block value_heads value_dim embed", (2, *values, s.embed), by_value)),
            ba=ColumnLinear(Param("block value_heads embed", (2, *heads, s.embed), by_value)),
            conv_qk=Param("block key_heads key_dim taps", (*keys, s.taps), by_key),
            conv_v=Param("value_heads value_dim taps", (*values, s.taps), by_value),
            a_log=Param("value_heads", heads, by_value),
            dt_bias=Param("value_heads", heads, by_value),
            norm=GatedNorm(Param("value_dim", (s.value_dim,)), eps=s.eps),
            out=RowLinear(Param("embed value_heads value_dim", (s.embed, *values), by_value)),
        )

    def project(self, x: Float[Array, "batch seq embed"]) -> Mixed:
        qk, vz, ba = self.qk(x), self.vz(x), self.ba(x).astype(jnp.float32)
        step = jax.nn.softplus(ba[:, :, 1] + self.dt_bias.astype(jnp.float32))
        return Mixed(
            qkv=jnp.concatenate([_flat(qk), _flat(vz[:, :, 0])], axis=-1),
            gate=vz[:, :, 1],
            beta=jax.nn.sigmoid(ba[:, :, 0]),
            log_decay=-jnp.exp(self.a_log.astype(jnp.float32)) * step,
        )

    def convolve(
        self, qkv: Float[Array, "batch seq channels"], before: Float[Array, "batch before channels"]
    ) -> tuple[
        Float[Array, "batch seq key_heads key_dim"],
        Float[Array, "batch seq key_heads key_dim"],
        Float[Array, "batch seq value_heads value_dim"],
    ]:
        """q and k of norm 1, in float32, and v, of each token and the taps - 1 before it; float32 inside."""
        count = self.conv_v.shape[-1]
        taps = jnp.concatenate([w.reshape(-1, count) for w in (self.conv_qk, self.conv_v)]).astype(jnp.float32)
        wide = jnp.concatenate([before, qkv], axis=SEQ).astype(jnp.float32)
        mixed = _silu(sum(wide[:, i : i + qkv.shape[SEQ]] * taps[:, i] for i in range(count)))
        (_, heads, key_dim), value_shape = self.conv_qk.shape[:3], self.conv_v.shape[:2]
        keys = heads * key_dim
        qk = mixed[..., : 2 * keys].reshape(*qkv.shape[:2], 2, heads, key_dim)
        qk = qk * lax.rsqrt(jnp.sum(jnp.square(qk), axis=-1, keepdims=True) + L2_EPS)
        v = mixed[..., 2 * keys :].reshape(*qkv.shape[:2], *value_shape).astype(qkv.dtype)
        return qk[:, :, 0], qk[:, :, 1], v

    def finish(
        self, o: Float[Array, "batch seq value_heads value_dim"], mixed: Mixed, residual: Residual
    ) -> Float[Array, "batch part_seq embed"]:
        return self.out(self.norm(o, mixed.gate), residual)

    def __call__(
        self,
        x: Float[Array, "batch seq embed"],
        *,
        mask: Bool[Array, "batch seq"] | None = None,
        residual: Residual = WHOLE_STREAM,
    ) -> Float[Array, "batch part_seq embed"]:
        """A whole sequence, split over `context`. Tokens out of the mask leave the state as it is."""
        if size := _piece_size(x):
            out, _ = self._in_pieces(x, size, mask, None)
            return out
        mixed = self.project(x)
        before = tokens_before(mixed.qkv, self.conv_v.shape[-1] - 1)
        q, k, v = self.convolve(mixed.qkv, before)
        o, _ = delta_over_context(q, k, v, mixed.log_decay, mixed.beta, mask=mask)
        return self.finish(o, mixed, residual)

    def prefill(
        self, x: Float[Array, "batch seq embed"], lengths: Int[Array, " batch"]
    ) -> tuple[Float[Array, "batch seq embed"], Recurrent]:
        """As `__call__` for rows of these lengths; also what decoding goes on from, on every device of `context`."""
        place = lax.axis_index(CONTEXT) * x.shape[SEQ] + jnp.arange(x.shape[SEQ])
        mask = place < lengths[:, None]
        if size := _piece_size(x):
            out, kept = self._in_pieces(x, size, mask, lengths)
            return out, lax.psum(kept, CONTEXT)  # of one device: tells the type, moves nothing
        mixed = self.project(x)
        count = self.conv_v.shape[-1] - 1
        q, k, v = self.convolve(mixed.qkv, tokens_before(mixed.qkv, count))
        o, state = delta_over_context(q, k, v, mixed.log_decay, mixed.beta, mask=mask, keep=True)
        return self.finish(o, mixed, WHOLE_STREAM), Recurrent(last_tokens(mixed.qkv, lengths, count), state)

    def _in_pieces(
        self,
        x: Float[Array, "batch seq embed"],
        size: int,
        mask: Bool[Array, "batch seq"] | None,
        lengths: Int[Array, " batch"] | None,
    ) -> tuple[Float[Array, "batch seq embed"], Recurrent]:
        """Output of a sequence that one device has whole, `size` tokens of each row at a time, the first piece shorter.

        Also what decoding goes on from after rows of these lengths; without lengths its tail is that of whole rows.
        """
        count, first = self.conv_v.shape[-1] - 1, x.shape[SEQ] % size
        layer = varying_like(self, x)  # so that gradients are summed over `data` once, not for each piece

        def piece(
            carry: tuple[Recurrent, Array], part: tuple[Array, Array | None, Int[Array, ""]]
        ) -> tuple[tuple[Recurrent, Array], Array]:
            """From the state before a piece to the one after it, and what has been found of the tail; the output."""
            (before, kept), (x, mask, start) = carry, part
            out, after, qkv = layer._go_on(x, before, mask)
            kept = after.tail if lengths is None else kept + tokens_kept(qkv, lengths, count, start)
            return (after, kept), out

        def cut(x: Array | None) -> Array | None:
            """Of the pieces after the first ones: (piece, row, token)."""
            if x is None:
                return None
            return jnp.moveaxis(x[:, first:].reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)

        one = layer.project(x[:, :1])  # for its type alone
        heads, value_dim = self.conv_v.shape[:2]
        state = jnp.zeros((x.shape[0], heads, self.conv_qk.shape[-2], value_dim), jnp.float32)
        tail = tokens_before(one.qkv, count)
        carry, outs = (Recurrent(tail, varying_like(state, one.log_decay)), tail), []
        if first:
            part = x[:, :first], None if mask is None else mask[:, :first], jnp.zeros((), jnp.int32)
            carry, out = piece(carry, part)
            outs = [out]
        starts = first + size * jnp.arange(x.shape[SEQ] // size)
        (last, kept), out = lax.scan(piece, carry, (cut(x), cut(mask), starts))
        outs.append(jnp.moveaxis(out, 0, 1).reshape(x.shape[0], -1, x.shape[-1]))
        return jnp.concatenate(outs, axis=SEQ), Recurrent(kept, last.state)

    def step(
        self, x: Float[Array, "batch one embed"], cache: Recurrent
    ) -> tuple[Float[Array, "batch one embed"], Recurrent]:
        """One more token of each row, the same on every device of `context`."""
        out, after, _ = self._go_on(x, cache)
        return out, after

    def _go_on(
        self, x: Float[Array, "batch seq embed"], before: Recurrent, mask: Bool[Array, "batch seq"] | None = None
    ) -> tuple[Float[Array, "batch seq embed"], Recurrent, Float[Array, "batch seq channels"]]:
        """The output for tokens that follow, what those after them go on from, and the inputs of the convolution."""
        mixed = self.project(x)
        tail = jnp.concatenate([before.tail, mixed.qkv], axis=SEQ)[:, x.shape[SEQ] :]
        q, k, v = self.convolve(mixed.qkv, before.tail)
        o, state = gated_delta(q, k, v, mixed.log_decay, mixed.beta, mask=mask, state=before.state)
        return self.finish(o, mixed, WHOLE_STREAM), Recurrent(tail, state), mixed.qkv


def _piece_size(x: Float[Array, "batch seq embed"]) -> int:
    """How many tokens of each row to take at a time; 0 for all of them.

    Only where one device has whole sequences and all heads: no piece is worth a collective of its own.
    """
    size = max(1, CPU_PIECE // (max(x.shape[0], 1) * CPU_STEP)) * CPU_STEP
    alone = lax.axis_size(CONTEXT) == lax.axis_size(TP) == 1
    return size if traced_platform() == "cpu" and alone and x.shape[SEQ] > size else 0


def _silu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x * sigmoid(x) in float32; on CPUs as a quotient.

    XLA for CPUs computes a quotient once. A product it works out again in every step that reads it, with the
    convolution that it is of: in a decode step for each number of the new state, a sixth of the step.
    """
    if traced_platform() != "cpu":
        return jax.nn.silu(x)
    return x / (1 + jnp.exp(-jnp.maximum(x, -80)))  # below -80 nothing is left; no exponential is infinite


def _flat(x: Float[Array, "batch seq *rest"]) -> Float[Array, "batch seq channels"]:
    return x.reshape(*x.shape[:2], -1)


def empty_recurrent(sizes: Sizes, layers: int, batch: int, dtype: jnp.dtype) -> Recurrent:
    """What this device keeps of no token, for so many layers."""
    ways = lax.axis_size(TP)
    heads, key_channels = sizes.value_heads // ways, sizes.key_heads // ways * sizes.key_dim
    channels = 2 * key_channels + heads * sizes.value_dim
    tail = to_storage(jnp.zeros((layers, batch, sizes.taps - 1, channels), dtype))
    state = jnp.zeros((layers, batch, heads, sizes.key_dim, sizes.value_dim), jnp.float32)
    return varying_over(Recurrent(tail, state), frozenset({PIPE, DATA, *TP}))


def tokens_before(x: Float[Array, "batch seq channels"], count: int) -> Float[Array, "batch count channels"]:
    """The `count` tokens before this device's share of the sequence, zeros before its beginning."""
    degree, seq = lax.axis_size(CONTEXT), x.shape[SEQ]
    hops = min(degree - 1, -(-count // max(seq, 1)))
    parts = [
        lax.ppermute(x[:, -count:], CONTEXT, [(i, i + hop) for i in range(degree - hop)]) for hop in range(hops, 0, -1)
    ]
    zeros = varying_like(jnp.zeros((x.shape[0], count, x.shape[2]), x.dtype), x)
    return jnp.concatenate([zeros, *parts], axis=SEQ)[:, -count:] if count else zeros


def last_tokens(
    x: Float[Array, "batch seq channels"], lengths: Int[Array, " batch"], count: int
) -> Float[Array, "batch count channels"]:
    """The last `count` tokens of each row, zeros before its first one: one all-reduce over `context`."""
    return lax.psum(tokens_kept(x, lengths, count, lax.axis_index(CONTEXT) * x.shape[SEQ]), CONTEXT)


def tokens_kept(
    x: Float[Array, "batch seq channels"], lengths: Int[Array, " batch"], count: int, start: Int[Array, ""]
) -> Float[Array, "batch count channels"]:
    """Those of the last `count` tokens of each row that are in this part of it, from `start` on, and zeros."""
    local = lengths[:, None] - count + jnp.arange(count) - start
    here = (local >= 0) & (local < x.shape[SEQ])
    found = jnp.take_along_axis(x, jnp.clip(local, 0, x.shape[SEQ] - 1)[..., None], axis=SEQ)
    return jnp.where(here[..., None], found, 0)


def delta_over_context(
    q: Float[Array, "batch seq key_heads key_dim"],
    k: Float[Array, "batch seq key_heads key_dim"],
    v: Float[Array, "batch seq heads value_dim"],
    log_decay: Float[Array, "batch seq heads"],
    beta: Float[Array, "batch seq heads"],
    *,
    mask: Bool[Array, "batch seq"] | None = None,
    keep: bool = False,
) -> tuple[Float[Array, "batch seq heads value_dim"], Float[Array, "batch heads key_dim value_dim"]]:
    """`gated_delta` of a sequence that is split over `context`: outputs of this share, and the state after all of it.

    With `keep` the state is known to be the same on all devices of `context`, as decoding needs it; no gradient then.
    """
    if lax.axis_size(CONTEXT) == 1:
        out, state = gated_delta(q, k, v, log_decay, beta, mask=mask)
        return out, lax.psum(state, CONTEXT) if keep else state  # of one device: tells the type, moves nothing
    out, state, reach, transition = gated_delta_parts(q, k, v, log_decay, beta, mask=mask)
    key_dim = transition.shape[-1]
    summaries = lax.all_gather(
        jnp.concatenate([transition, state], axis=-1), CONTEXT, to="invarying" if keep else "varying"
    )

    def after(before: Array, summary: Array) -> tuple[Array, Array]:
        moved = jnp.matmul(summary[..., :key_dim], before, precision=lax.Precision.HIGHEST)
        return moved + summary[..., key_dim:], before

    nothing = varying_like(jnp.zeros(state.shape, state.dtype), summaries)
    last, before = lax.scan(after, nothing, summaries)
    own = lax.dynamic_index_in_dim(before, lax.axis_index(CONTEXT), keepdims=False)
    read = jnp.einsum("bshk,bhkv->bshv", reach, own, precision=lax.Precision.HIGHEST)
    return (out + read).astype(v.dtype), last
