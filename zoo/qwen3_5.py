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
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import P, lax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float, Int

from shardzoo.errors import InputError, fail_if, not_above_zero
from shardzoo.zoo import delta_net, language_model, layout, pipeline, pipeline_gradients
from shardzoo.zoo.attention import attention
from shardzoo.zoo.decoder_model import Mlp
from shardzoo.zoo.delta_net import DeltaNet
from shardzoo.zoo.dtypes import float_dtype
from shardzoo.zoo.families import Family, TraceSizes, register
from shardzoo.zoo.language_model import (
    Forward,
    Run,
    check_run,
    input_problems,
    own_places,
    sequence_positions,
    with_features,
)
from shardzoo.zoo.layers import WHOLE_STREAM, ColumnLinear, Embedding, Residual, RMSNorm, RowLinear, gather_residual
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
        problems += not_above_zero(self, "norm_eps")
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

    It returns logits [batch, seq, vocab], split like batch, seq and vocabulary. What f takes is explained at
    `language_model.Forward`. Of tokens out of its mask DeltaNet reads zeros, which still wears its state down, so that
    results after them are not those of a row without them; positions along axes are those of time, row and column.

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
    run = Run(residual=residual, remat=remat, dtype=float_dtype("qwen3_5.forward", dtype))

    def one_device(model: Qwen35, microbatches: int, **inputs: Array) -> Float[Array, "batch seq vocab"]:
        return _forward(model, declared, dataclasses.replace(run, microbatches=microbatches), **inputs)

    return language_model.forward(
        "qwen3_5.forward",
        declared,
        mesh,
        one_device,
        problems=lambda model, **inputs: problems(declared.config, **inputs),
        out_specs=P(DATA, CONTEXT, VOCAB),
        residual=residual,
        microbatches=microbatches,
    )


def loss_and_grad(
    declared: Qwen35,
    mesh: Mesh | AbstractMesh,
    *,
    loss: pipeline_gradients.Loss = pipeline_gradients.token_loss,
    trainable: str | Iterable[str] | None = None,
    residual: Residual = "whole",
    remat: Remat = False,
    dtype: Any = None,
    microbatches: int | None = None,
) -> pipeline_gradients.LossAndGrad:
    """The pure function `f(model, tokens, labels, counts, ...)`: loss and gradient by "1f1b", to be jitted.

    f, `loss` and `trainable` are explained at `pipeline_gradients.LossAndGrad` and `.loss_and_grad`; the other options
    are those of `forward`. Layers are computed again in any case: `remat` says what is kept for one microbatch in one
    stage.

    Raises:
        InputError: as `forward`; quantized weights among the trainable ones; a pattern that matches no leaf.
    """
    check_run("qwen3_5.loss_and_grad", declared, mesh, residual, remat, microbatches)
    run = Run(residual=residual, remat=remat, dtype=float_dtype("qwen3_5.loss_and_grad", dtype))
    parts = pipeline_gradients.Parts(
        stacks=("delta", "attn"),
        enter=functools.partial(enter, run=run),
        stage=functools.partial(stage, declared=declared, run=run),
        leave=lambda model, x: model.logits(model.norm(x), residual),
    )
    return pipeline_gradients.loss_and_grad(
        "qwen3_5.loss_and_grad",
        parts,
        declared,
        mesh,
        problems=lambda model, **inputs: problems(declared.config, **inputs),
        loss=loss,
        trainable=trainable,
        residual=residual,
        microbatches=microbatches,
    )


def problems(config: Config, *, positions=None, **others) -> Iterator[str]:
    """What is wrong with the inputs of a forward pass, or of a prompt."""
    yield from input_problems(config.embed, **others)
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
    x, (table, norm, head) = layout.in_turn(x, (model.embed, model.norm, model.head))
    model = dataclasses.replace(model, embed=table, norm=norm, head=head)
    layers = {"delta": model.delta, "attn": model.attn}
    run_stage = functools.partial(stage, declared=declared, run=run)
    rounds = pipeline.rounds_of(declared)
    x, _ = pipeline.through(run_stage, layers, x, rows, microbatches=run.microbatches, rounds=rounds)
    return model.logits(model.norm(x), run.residual)


def enter(
    model: Qwen35, rows: dict[str, Array], features: Float[Array, "rows embed"] | None = None, *, run: Run
) -> Float[Array, "batch part_seq embed"]:
    """The stream before the first layer, the same on every device of `pipe`."""
    x = model.embed(rows["tokens"], run.dtype, run.residual)
    return with_features(x, features, own_places(rows, run.residual))


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
