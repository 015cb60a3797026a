"""The Qwen3.5 language model: super-blocks of some Gated DeltaNet layers and one gated attention layer.

Source: the class Qwen3_5ForCausalLM of transformers 5, which is also the text model of Qwen3_5ForConditionalGeneration.
Norms are stored around zero; the attention's query comes with a gate for each head; rotary embedding turns the first
channels of a head only, by positions along three axes where tokens of images are among those of text.

Mesh axes: the batch over `data`, the sequence over `context`, heads and mlp over the tensor axes, KV heads over `kv`,
super-blocks over `pipe`, the vocabulary over `pipe` and the tensor axes. Shapes inside layers are one device's. Layers
of a kind are stacked; a `lax.scan` over super-blocks runs one over the DeltaNet layers of each, then its attention
layer.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from beartype import beartype
from jax import P, lax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Bool, Float, Int, jaxtyped

from shardzoo.errors import InputError, fail_if
from shardzoo.zoo import delta_net, layout, pipeline, pipeline_gradients
from shardzoo.zoo.attention import attention
from shardzoo.zoo.decoder import Host, check_run, pad, seq_ways_of, sequence_positions
from shardzoo.zoo.decoder_model import Mlp
from shardzoo.zoo.delta_net import DeltaNet
from shardzoo.zoo.families import Family, TraceSizes, register
from shardzoo.zoo.layers import (
    WHOLE_STREAM,
    ColumnLinear,
    Embedding,
    Residual,
    RMSNorm,
    RowLinear,
    gather_residual,
    own_share,
)
from shardzoo.zoo.layout import Param
from shardzoo.zoo.mesh import CONTEXT, DATA, KV, PIPE, TP, VOCAB
from shardzoo.zoo.remat import Remat, rematerialised
from shardzoo.zoo.rope import Rope, Rotary, frequencies, rotate

AXES = 3  # of the position of a token: time, row, column
_SIZES = (
    *("vocab", "embed", "layers", "interval", "heads", "kv_heads", "head_dim", "rotary_dim", "mlp"),
    *("key_heads", "value_heads", "key_dim", "value_dim", "taps", "max_positions"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and variants.

    Attributes:
        vocab, embed, layers, mlp: sizes.
        interval: every `interval`-th layer is attention, those before it are DeltaNet.
        heads, kv_heads, head_dim: of attention.
        rotary_dim: how many channels of a head turn, the first ones.
        sections: how many of their pairs each axis of a position turns; they take turns, pair by pair, while they last.
        rope: rotary frequencies.
        key_heads, value_heads, key_dim, value_dim: of DeltaNet; there are as many queries as keys.
        taps: tokens that its convolution sees, the current one included.
        norm_eps: of every norm.
        tied: the output head is the embedding.
        max_positions: longest sequence that the model is made for.
    """

    vocab: int
    embed: int
    layers: int
    mlp: int
    interval: int = 4
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    sections: tuple[int, ...] = (11, 11, 10)
    rope: Rope = dataclasses.field(default_factory=lambda: Rope(theta=1e7))
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int = 4
    norm_eps: float = 1e-6
    tied: bool = False
    max_positions: int = 262144

    def __post_init__(self):
        problems = [f"{n}={getattr(self, n)} is not at least 1: change it" for n in _SIZES if getattr(self, n) < 1]
        fail_if(problems or self._problems(), "qwen3-5 config")

    def _problems(self) -> Iterator[str]:
        for many, few in (("heads", "kv_heads"), ("value_heads", "key_heads"), ("layers", "interval")):
            if getattr(self, many) % getattr(self, few):
                pair = f"{many}={getattr(self, many)} does not divide by {few}={getattr(self, few)}"
                yield f"{pair}: change one of them"
        if self.interval < 2:
            yield f"interval={self.interval} leaves no DeltaNet layer: use the decoder family, or at least 2"
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            yield f"rotary_dim={self.rotary_dim} is odd or above head_dim={self.head_dim}: change one of them"
        if len(self.sections) != AXES or any(n < 0 for n in self.sections):
            yield f"sections={self.sections} are not {AXES} numbers from 0: give one for each axis of a position"

    @property
    def super_blocks(self) -> int:
        return self.layers // self.interval

    @property
    def delta_sizes(self) -> delta_net.Sizes:
        return delta_net.Sizes(
            self.embed, self.key_heads, self.value_heads, self.key_dim, self.value_dim, self.taps, self.norm_eps
        )


def pair_axes(config: Config) -> np.ndarray:
    """The axis of a position that each rotary pair turns by.

    Axis a > 0 has pairs a, a + 3, a + 6 ... as many as its section says; all others are of axis 0.
    """
    axes = np.zeros(config.rotary_dim // 2, int)
    for axis, count in list(enumerate(config.sections))[1:]:
        axes[axis : AXES * count : AXES] = axis
    return axes


def rotary(config: Config, positions: Int[Array, "rows seq *axes"]) -> Rotary:
    """Cosine and sine of the angles, float32; positions are single numbers, or have one more dim of three axes."""
    by_pair = positions[..., pair_axes(config) if positions.ndim == 3 else None]
    angles = by_pair.astype(jnp.float32) * frequencies(config.rope, config.rotary_dim)
    return jnp.cos(angles), jnp.sin(angles)


def rotate_first(x: Float[Array, "batch seq heads head_dim"], turn: Rotary) -> Float[Array, "batch seq heads head_dim"]:
    """x with the channels that the tables are for turned; the others stay."""
    width = 2 * turn[0].shape[-1]
    if width == x.shape[-1]:
        return rotate(x, turn)
    return jnp.concatenate([rotate(x[..., :width], turn), x[..., width:]], axis=-1)


class GatedAttention(eqx.Module):
    """Projections, norms and gate round an attention: x whole in embed -> q, kv, gate by heads; output whole again.

    `qg[B, S, H_TP, 2, D] = x[B, S, E] . Wqg[H_TP, 2, D, E]` is query and gate of each head; `kv[B, S, 2, K_kv, D]`
    likewise; `y[B, S, E] = psum_TP((o * sigmoid(gate))[B, S, H_TP, D] . Wo[E, H_TP, D])`.
    """

    qg: ColumnLinear
    kv: ColumnLinear
    out: RowLinear
    q_norm: RMSNorm
    k_norm: RMSNorm

    @classmethod
    def declare(cls, c: Config) -> "GatedAttention":
        qg, kv = (c.heads, 2, c.head_dim, c.embed), (2, c.kv_heads, c.head_dim, c.embed)
        return cls(
            qg=ColumnLinear(Param("heads block head_dim embed", qg, {"heads": TP})),
            kv=ColumnLinear(Param("block kv_heads head_dim embed", kv, {"kv_heads": KV})),
            out=RowLinear(Param("embed heads head_dim", (c.embed, c.heads, c.head_dim), {"heads": TP})),
            q_norm=_norm("head_dim", c.head_dim, c),
            k_norm=_norm("head_dim", c.head_dim, c),
        )

    def project(
        self, x: Float[Array, "batch seq embed"], turn: Rotary
    ) -> tuple[
        Float[Array, "batch seq heads head_dim"],
        Float[Array, "batch seq two kv_heads head_dim"],
        Float[Array, "batch seq heads head_dim"],
    ]:
        """Queries, keys and values, gates."""
        qg, kv = self.qg(x), self.kv(x)
        q, k = self.q_norm(qg[:, :, :, 0]), self.k_norm(kv[:, :, 0])
        return rotate_first(q, turn), jnp.stack([rotate_first(k, turn), kv[:, :, 1]], axis=2), qg[:, :, :, 1]

    def finish(
        self,
        attended: Float[Array, "batch seq heads head_dim"],
        gate: Float[Array, "batch seq heads head_dim"],
        residual: Residual = WHOLE_STREAM,
    ) -> Float[Array, "batch part_seq embed"]:
        return self.out(attended * jax.nn.sigmoid(gate), residual)


def _norm(dim: str, size: int, c: Config) -> RMSNorm:
    return RMSNorm(Param(dim, (size,)), eps=c.norm_eps, offset=1.0)


def _mlp(c: Config) -> Mlp:
    return Mlp(
        gate_up=ColumnLinear(Param("block mlp embed", (2, c.mlp, c.embed), {"mlp": TP})),
        down=RowLinear(Param("embed mlp", (c.embed, c.mlp), {"mlp": TP})),
    )


Mixer = TypeVar("Mixer", DeltaNet, GatedAttention)


class Block(eqx.Module, Generic[Mixer]):
    """What both kinds of layer have round their mixer.

    Collectives of a layer, besides those over `context` of its mixer, all over the tensor axes: with the "whole"
    residual two all-reduces, with "seq" two all-gathers and two reduce-scatters.
    """

    mixer_norm: RMSNorm
    mixer: Mixer
    mlp_norm: RMSNorm
    mlp: Mlp

    @classmethod
    def declare(cls, c: Config, mixer: Mixer) -> "Block[Mixer]":
        norms = (_norm("embed", c.embed, c) for _ in range(2))
        return cls(mixer_norm=next(norms), mixer=mixer, mlp_norm=next(norms), mlp=_mlp(c))

    def enter(
        self, x: Float[Array, "batch part_seq embed"], residual: Residual = WHOLE_STREAM
    ) -> Float[Array, "batch seq embed"]:
        """What the mixer reads of the stream."""
        return gather_residual(self.mixer_norm(x), residual)

    def finish(
        self,
        x: Float[Array, "batch part_seq embed"],
        mixed: Float[Array, "batch part_seq embed"],
        residual: Residual = WHOLE_STREAM,
    ) -> Float[Array, "batch part_seq embed"]:
        """The stream after this layer, from what the mixer gives."""
        x = x + mixed
        return x + self.mlp(gather_residual(self.mlp_norm(x), residual), residual)


class Qwen35(eqx.Module):
    """Embedding, the stacked layers of both kinds, final norm and head (None when tied).

    Layer i of the model is attention if i + 1 divides by `interval`. `delta` and `attn` hold the layers of each kind in
    the order of the model.
    """

    embed: Embedding
    delta: Block[DeltaNet]
    attn: Block[GatedAttention]
    norm: RMSNorm
    head: Embedding | None
    config: Config = eqx.field(static=True)

    @classmethod
    def declare(cls, c: Config) -> "Qwen35":
        def table() -> Embedding:
            return Embedding(Param("vocab embed", (c.vocab, c.embed), {"vocab": VOCAB}), axis=VOCAB)

        return cls(
            embed=table(),
            delta=layout.stack(Block.declare(c, DeltaNet.declare(c.delta_sizes)), c.layers - c.super_blocks, PIPE),
            attn=layout.stack(Block.declare(c, GatedAttention.declare(c)), c.super_blocks, PIPE),
            norm=_norm("embed", c.embed, c),
            head=None if c.tied else table(),
            config=c,
        )

    def logits(
        self, x: Float[Array, "batch part_seq embed"], residual: Residual = WHOLE_STREAM
    ) -> Float[Array, "batch seq vocab"]:
        """Logits of this device's part of the vocabulary, from the normed stream."""
        return (self.embed if self.head is None else self.head).logits(gather_residual(x, residual))


def declare(config: Config, dtype: Any = np.float32) -> Qwen35:
    """The declared model with every weight in `dtype`."""
    return layout.astype(Qwen35.declare(config), dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """How `forward` runs; the options are explained there."""

    residual: Residual = "whole"
    remat: Remat = False
    dtype: Any = None
    microbatches: int = 1


@runtime_checkable
class Forward(Protocol):
    """See `forward`."""

    def __call__(
        self,
        model: Qwen35,
        tokens: Int[Host, "batch seq"],
        *,
        lengths: Int[Host, " batch"] | None = None,
        mask: Bool[Host, "batch seq"] | None = None,
        positions: Int[Host, "batch seq *axes"] | None = None,
        features: Float[Host, "rows embed"] | None = None,
        places: Int[Host, "batch seq"] | None = None,
    ) -> Float[Array, "batch seq vocab"]: ...


def forward(
    declared: Qwen35,
    mesh: Mesh | AbstractMesh,
    *,
    residual: Residual = "whole",
    remat: Remat = False,
    dtype: Any = None,
    microbatches: int | None = None,
) -> Forward:
    """The pure function `f(model, tokens, *, lengths, mask, positions, features, places)`: to be jitted.

    It returns logits [batch, seq, vocab], split like batch, seq and vocabulary. Any batch and length will do: both are
    padded to what the mesh needs, and the result is cut back.

    f's arguments, beside the live model and the tokens:
        lengths: valid prefix of each row (rows padded on the right); results beyond it mean nothing.
        mask: True for tokens that others may see, for padding on any side; results on padding and after it are those of
            the transformers library: attention does not see these tokens, DeltaNet reads zeros there, which still wears
            its state down. Not with `lengths`.
        positions: of the tokens, for the rotation only; 0, 1, 2 ... if not given. Those along the axes time, row and
            column are [batch, seq, 3].
        features, places: what stands in for embeddings, such as the states of an image: `places` says for each token
            which row of `features` replaces its embedding, or -1. Both or neither.

    Args:
        residual: "seq" splits the stream between layers along the sequence over the tensor axes as well.
        remat: compute each layer again in the backward pass rather than keep its activations: all of it, or what a
            policy says (`remat.py`).
        dtype: of the activations; None is that of the weights. Decays and states are float32 whatever it is.
        microbatches: how many each device's rows are cut into, which stages of `pipe` work on at the same time; as many
            as there are stages, and rows for, if not given. More of them leave less idle (`pipeline.bubble`).

    Raises:
        InputError: the mesh does not fit the declaration; an unknown residual.
    """
    check_run("qwen3_5.forward", declared, mesh, residual, remat, microbatches)
    run = Run(residual=residual, remat=remat, dtype=None if dtype is None else jnp.dtype(dtype))
    sequence = {name: P(DATA, CONTEXT) for name in ("tokens", "mask", "positions", "places")}
    split = {**sequence, "lengths": P(DATA), "features": P()}
    seq_ways = seq_ways_of(mesh, residual)

    @jaxtyped(typechecker=beartype)
    def f(
        model: Qwen35,
        tokens: Int[Host, "batch seq"],
        *,
        lengths: Int[Host, " batch"] | None = None,
        mask: Bool[Host, "batch seq"] | None = None,
        positions: Int[Host, "batch seq *axes"] | None = None,
        features: Float[Host, "rows embed"] | None = None,
        places: Int[Host, "batch seq"] | None = None,
    ) -> Float[Array, "batch seq vocab"]:
        fail_if(input_problems(declared.config, lengths, mask, positions, features, places), "qwen3_5.forward")
        given = {"tokens": tokens, "lengths": lengths, "mask": mask, "positions": positions, "places": places}
        cut = pipeline.microbatches_for(microbatches, mesh, tokens.shape[0])
        arrays = {k: pad(jnp.asarray(v), mesh.shape[DATA] * cut, seq_ways) for k, v in given.items() if v is not None}
        arrays |= {} if features is None else {"features": jnp.asarray(features)}
        shard = jax.shard_map(
            lambda model, arrays: _forward(model, declared, dataclasses.replace(run, microbatches=cut), **arrays),
            mesh=mesh,
            in_specs=(layout.specs(declared), {k: split[k] for k in arrays}),
            out_specs=P(DATA, CONTEXT, VOCAB),
            check_vma=True,
        )
        return shard(model, arrays)[: tokens.shape[0], : tokens.shape[1]]

    return f


@runtime_checkable
class LossAndGrad(Protocol):
    """See `loss_and_grad`."""

    def __call__(
        self,
        model: Qwen35,
        tokens: Int[Host, "batch seq"],
        labels: Int[Host, "batch seq"],
        counts: Bool[Host, "batch seq"] | None = None,
        *,
        lengths: Int[Host, " batch"] | None = None,
        mask: Bool[Host, "batch seq"] | None = None,
        positions: Int[Host, "batch seq *axes"] | None = None,
        features: Float[Host, "rows embed"] | None = None,
        places: Int[Host, "batch seq"] | None = None,
    ) -> tuple[Float[Array, ""], Qwen35]: ...


def loss_and_grad(
    declared: Qwen35,
    mesh: Mesh | AbstractMesh,
    *,
    loss: pipeline_gradients.Loss = pipeline_gradients.token_loss,
    residual: Residual = "whole",
    remat: Remat = False,
    dtype: Any = None,
    microbatches: int | None = None,
) -> LossAndGrad:
    """The pure function `f(model, tokens, labels, counts, ...)`: loss and gradient by "1f1b", to be jitted.

    The same numbers as the gradient of `losses.cross_entropy(forward(...), labels, counts)`, the mean over the labels
    that count, in less memory where layers are split over `pipe` or rows cut into microbatches. The gradient is that
    of the model's weights, split like them; the layers run in rounds if `declared` is `pipeline.interleaved`.

    Args:
        loss: `(logits, labels, weights) -> number` of one microbatch on one device, inside of the `shard_map`: logits
            are split over VOCAB, the weights of all labels that count are 1 / their number. Losses of all microbatches
            and devices are summed.
        residual, remat, dtype, microbatches: as in `forward`. Layers are computed again in any case; `remat` says what
            is kept for one microbatch in one stage.

    Raises:
        InputError: as `forward`; quantized weights.
    """
    check_run("qwen3_5.loss_and_grad", declared, mesh, residual, remat, microbatches)
    run = Run(residual=residual, remat=remat, dtype=None if dtype is None else jnp.dtype(dtype))
    parts = pipeline_gradients.Parts(
        stacks=("delta", "attn"),
        enter=functools.partial(enter, run=run),
        stage=functools.partial(stage, declared=declared, run=run),
        leave=lambda model, x: model.logits(model.norm(x), residual),
    )
    step = pipeline_gradients.loss_and_grad(
        "qwen3_5.loss_and_grad",
        parts,
        declared,
        mesh,
        loss=loss,
        vocab=declared.config.vocab,
        seq_ways=seq_ways_of(mesh, residual),
        microbatches=microbatches,
    )

    @jaxtyped(typechecker=beartype)
    def f(
        model: Qwen35,
        tokens: Int[Host, "batch seq"],
        labels: Int[Host, "batch seq"],
        counts: Bool[Host, "batch seq"] | None = None,
        *,
        lengths: Int[Host, " batch"] | None = None,
        mask: Bool[Host, "batch seq"] | None = None,
        positions: Int[Host, "batch seq *axes"] | None = None,
        features: Float[Host, "rows embed"] | None = None,
        places: Int[Host, "batch seq"] | None = None,
    ) -> tuple[Float[Array, ""], Qwen35]:
        problems = input_problems(declared.config, lengths, mask, positions, features, places)
        fail_if(problems, "qwen3_5.loss_and_grad")
        given = {"lengths": lengths, "mask": mask, "positions": positions, "places": places}
        return step(model, tokens, labels, counts, features, **given)

    return f


def input_problems(config: Config, lengths, mask, positions, features, places) -> Iterator[str]:
    """What is wrong with the inputs of a forward pass, or of a prompt."""
    if lengths is not None and mask is not None:
        yield "lengths and mask were both given: give one of them"
    if (features is None) != (places is None):
        yield "features and places go together: give both or neither"
    if features is not None and features.shape[1] != config.embed:
        yield f"features: width {features.shape[1]} is not the model's embed={config.embed}: give those of this model"
    axes = () if positions is None else positions.shape[2:]
    if axes not in ((), (AXES,)):
        yield f"positions: axes {axes} are not those of time, row and column: give {AXES} numbers a token, or one"


def _forward(
    model: Qwen35,
    declared: Qwen35,
    run: Run,
    *,
    features: Float[Array, "rows embed"] | None = None,
    **rows: Array,
) -> Float[Array, "batch seq vocab"]:
    """One device's logits."""
    model = gather_ends(model, declared)
    x = enter(model, rows, features, run=run)
    layers = {"delta": model.delta, "attn": model.attn}
    run_stage = functools.partial(stage, declared=declared, run=run)
    rounds = pipeline.rounds_of(declared)
    x, _ = pipeline.through(run_stage, layers, x, rows, microbatches=run.microbatches, rounds=rounds)
    return model.logits(model.norm(x), run.residual)


def enter(
    model: Qwen35, rows: dict[str, Array], features: Float[Array, "rows embed"] | None = None, *, run: Run
) -> Float[Array, "batch part_seq embed"]:
    """The stream before the first layer, the same on every device of `pipe`."""
    x, places = model.embed(rows["tokens"], run.dtype, run.residual), rows.get("places")
    if features is None or places is None:
        return x
    own = places if run.residual == "whole" else own_share(places, TP)
    return jnp.where(own[..., None] < 0, x, features.astype(x.dtype)[jnp.maximum(own, 0)])


def stage(
    layers: dict[str, Block],
    x: Float[Array, "batch part_seq embed"],
    rows: dict[str, Array],
    first: Int[Array, ""] | int,
    *,
    declared: Qwen35,
    run: Run,
) -> tuple[Float[Array, "batch part_seq embed"], None]:
    """The stream after some of the super-blocks; which of the model's they are (`first`) makes no difference."""
    config, (lengths, mask, positions) = declared.config, map(rows.get, ("lengths", "mask", "positions"))
    order = sequence_positions(rows["tokens"].shape[1])
    turn = rotary(config, order if positions is None else positions)
    valid = None if lengths is None else order < lengths[:, None]

    def delta(x, block):
        block = layout.gather_at_rest(block, declared.delta)
        read = block.enter(x, run.residual)
        read = read if mask is None else jnp.where(mask[..., None], read, 0)
        return block.finish(x, block.mixer(read, mask=valid, residual=run.residual), run.residual), None

    def attend(x, block):
        block = layout.gather_at_rest(block, declared.attn)
        q, kv, gate = block.mixer.project(block.enter(x, run.residual), turn)
        attended = attention(q, kv, causal=True, lengths=lengths, key_mask=mask)
        return block.finish(x, block.mixer.finish(attended, gate, run.residual), run.residual)

    if on_host := any(p.memory == "host" for p in jax.tree.leaves(declared.delta)):
        # No loop reads a part of a part of an array in host memory, and none in another shape: there a super-block's
        # layers come to the device together, and are what is computed again.
        deltas = jnp.arange(layers["delta"].mixer_norm.weight.shape[0] // (config.interval - 1))
    else:
        delta, attend = (rematerialised(f, run.remat) for f in (delta, attend))
        deltas = by_super_block(config, layers["delta"])

    def super_block(x, blocks):
        deltas, attn = blocks
        deltas = one_super_block(declared, layers["delta"], deltas) if on_host else deltas
        x, _ = lax.scan(delta, x, deltas)
        return attend(x, attn), None

    body = rematerialised(super_block, run.remat) if on_host else super_block
    x, _ = lax.scan(body, x, (deltas, layers["attn"]))
    return x, None


def by_super_block(config: Config, delta: Block[DeltaNet]) -> Block[DeltaNet]:
    """The stacked DeltaNet layers with those of each super-block in a dim of their own, after that of super-blocks."""
    inner = config.interval - 1
    return jax.tree.map(lambda w: w.reshape(w.shape[0] // inner, inner, *w.shape[1:]), delta)


def one_super_block(declared: Qwen35, delta: Block[DeltaNet], index: Int[Array, ""]) -> Block[DeltaNet]:
    """The stacked DeltaNet layers of one super-block, on the device. No gradient flows through it."""
    inner = declared.config.interval - 1
    own = jax.tree.map(lambda w: lax.dynamic_slice_in_dim(_undifferentiated(w), index * inner, inner), delta)
    return layout.on_device(own, declared.delta)


@jax.custom_jvp
def _undifferentiated(stack: Array) -> Array:
    return stack


@_undifferentiated.defjvp
def _refuse(primals: tuple[Array], tangents: tuple[Array]):
    raise InputError(
        "qwen3_5.forward: layers in host memory have no gradient here: differentiate by other weights, or leave these"
        " on the device"
    )


def gather_ends(model: Qwen35, declared: Qwen35, *, to: str = "varying") -> Qwen35:
    """The model with everything but its layers gathered from a split at rest."""
    return layout.gather_parts(model, declared, ("embed", "norm", "head"), to=to)


PRESETS = {
    "qwen3.5-27b": Config(
        vocab=248320, embed=5120, layers=64, mlp=17408, heads=24, kv_heads=4, head_dim=256, rotary_dim=64,
        key_heads=16, value_heads=48, key_dim=128, value_dim=128,
    ),
}  # fmt: skip


def trace(declared: Qwen35, mesh: Mesh | AbstractMesh, sizes: TraceSizes, **run: Any) -> tuple[Callable, tuple]:
    """Logits of whole sequences, as `Family.trace` says."""
    return forward(declared, mesh, **run), (jax.ShapeDtypeStruct((sizes.batch, sizes.tokens), jnp.int32),)


register(
    Family(
        name="qwen3-5",
        config=Config,
        declare=declare,
        presets=PRESETS,
        trace=trace,
        text="shardzoo.zoo.qwen3_5_generate",  # by name: it imports this module
    )
)
