"""Dense decoder language models: Llama, Mistral, Qwen2, Qwen2.5 and Qwen3 from one file.

`declare` a model and make its `forward` for a mesh, or `encode`, which makes it an encoder of text; the layers are in
`decoder_model`, which says what they are made from. Mesh axes: the batch over `data`, the sequence over `context`,
heads and mlp over the tensor axes, KV heads over `kv`, blocks over `pipe`, the vocabulary over `pipe` and the tensor
axes.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from beartype import beartype
from jax import P, lax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Bool, Float, Int, jaxtyped

from shardzoo.errors import InputError
from shardzoo.kernels.flash_attention.options import varying_like
from shardzoo.zoo import language_model, layout, pipeline, pipeline_gradients
from shardzoo.zoo.attention import attention
from shardzoo.zoo.decoder_model import Block, Config, Decoder, window_of
from shardzoo.zoo.dtypes import float_dtype
from shardzoo.zoo.families import Family, TraceSizes, register
from shardzoo.zoo.in_place import block_at
from shardzoo.zoo.language_model import (
    Forward,
    Host,
    check_run,
    input_problems,
    own_places,
    sequence_positions,
    with_features,
)
from shardzoo.zoo.layers import Residual
from shardzoo.zoo.linears import linear_layers
from shardzoo.zoo.mesh import CONTEXT, DATA, PIPE, TP, VOCAB
from shardzoo.zoo.remat import Remat, rematerialised
from shardzoo.zoo.rope import Rope, rotary


def declare(config: Config, dtype: Any = np.float32) -> Decoder:
    """The declared decoder with every weight in `dtype`."""
    return layout.astype(Decoder.declare(config), dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(language_model.Run):
    """How `forward` runs; the options are explained there."""

    hidden_states: tuple[int, ...] | None = None
    logits: bool = True
    in_place: bool = False


def forward(
    declared: Decoder,
    mesh: Mesh | AbstractMesh,
    *,
    residual: Residual = "whole",
    remat: Remat = False,
    dtype: Any = None,
    hidden_states: tuple[int, ...] | bool = False,
    logits: bool = True,
    in_place: bool = False,
    microbatches: int | None = None,
) -> Forward:
    """The pure function `f(model, tokens, *, lengths, mask, positions, features, places)`: to be jitted.

    It returns logits [batch, seq, vocab], split like batch, seq and vocabulary; with hidden states asked for
    (logits, hidden [state, batch, seq, embed]), and only the latter with `logits=False`. What f takes is explained at
    `language_model.Forward`. Its queries on padding see the visible tokens before them; positions along several axes
    are for a rope with sections.

    Args:
        residual: "seq" splits the stream between blocks along the sequence over the tensor axes as well.
        remat: compute each block again in the backward pass rather than keep its activations: all of it, or what a
            policy says (`remat.py`).
        dtype: of the activations; None is that of the weights.
        hidden_states: True, or the indices wanted, in ascending order: 0 is the embedding, i the stream after block i,
            and the last one (i = layers) comes after the final norm.
        logits: False leaves out the head and all blocks after the last hidden state.
        in_place: read the weights where they lie, without a gradient: faster on a CPU in 16-bit floats (`in_place.py`).
        microbatches: how many each device's rows are cut into, which stages of `pipe` work on at the same time; as many
            as there are stages, and rows for, if not given. More of them leave less idle (`pipeline.bubble`).

    Raises:
        InputError: the mesh does not fit the declaration; an unknown residual; hidden states that do not exist.
    """
    check_run("decoder.forward", declared, mesh, residual, remat, microbatches)
    states = tuple(range(declared.config.layers + 1)) if hidden_states is True else hidden_states or None
    _check_states("decoder.forward", declared.config, states, logits)
    run = Run(
        residual=residual,
        remat=remat,
        dtype=float_dtype("decoder.forward", dtype),
        hidden_states=states,
        logits=logits,
        in_place=in_place,
    )
    stream = P(DATA, CONTEXT) if residual == "whole" else P(DATA, (CONTEXT, *TP))

    def one_device(model: Decoder, microbatches: int, **inputs: Array) -> Any:
        return _asked(run, *_forward(model, declared, dataclasses.replace(run, microbatches=microbatches), **inputs))

    return language_model.forward(
        "decoder.forward",
        declared,
        mesh,
        one_device,
        problems=lambda model, **inputs: itertools.chain(
            _problems(declared.config, **inputs), _missing(declared, run, model.blocks)
        ),
        out_specs=_asked(run, P(DATA, CONTEXT, VOCAB), P(None, *stream)),
        residual=residual,
        microbatches=microbatches,
    )


def _asked(run: Run, logits: Any, hidden: Any) -> Any:
    """What of both `forward` returns."""
    if run.hidden_states is None:
        return logits
    return (logits, hidden) if run.logits else hidden


def loss_and_grad(
    declared: Decoder,
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
    check_run("decoder.loss_and_grad", declared, mesh, residual, remat, microbatches)
    run = Run(residual=residual, remat=remat, dtype=float_dtype("decoder.loss_and_grad", dtype))
    parts = pipeline_gradients.Parts(
        stacks=("blocks",),
        enter=functools.partial(enter, run=run),
        stage=lambda blocks, *given: stage(blocks["blocks"], *given, declared=declared, run=run),
        leave=lambda model, x: model.logits(model.norm(x), residual),
    )
    return pipeline_gradients.loss_and_grad(
        "decoder.loss_and_grad",
        parts,
        declared,
        mesh,
        problems=lambda model, **inputs: _problems(declared.config, **inputs),
        loss=loss,
        trainable=trainable,
        residual=residual,
        microbatches=microbatches,
    )


def _problems(config: Config, *, positions=None, **others) -> Iterator[str]:
    yield from input_problems(config.embed, **others)
    axes = () if positions is None else positions.shape[2:]
    if axes not in ((), (len(config.rope.sections),)):
        sections = config.rope.sections
        yield f"positions: axes {axes} do not go with rope.sections={sections}: give one number for each section"


def _missing(declared: Decoder, run: Run, blocks: Block) -> Iterator[str]:
    there, last = pipeline.layers_of(blocks, pipeline.rounds_of(declared)), _last(declared.config, run)
    if there < last:
        wanted = "logits come" if run.logits else f"hidden state {last} comes"
        yield f"model has {there} blocks, and {wanted} after {last}: give it those"


def _last(config: Config, run: Run) -> int:
    """How many blocks are run."""
    return config.layers if run.logits or run.hidden_states is None else run.hidden_states[-1]


def _check_states(what: str, config: Config, states: tuple[int, ...] | None, logits: bool) -> None:
    if states is None and not logits:
        raise InputError(f"{what}: logits=False leaves nothing to return: ask for hidden_states")
    if states is None:
        return
    if list(states) != sorted(set(states)) or not 0 <= states[0] <= states[-1] <= config.layers:
        raise InputError(
            f"{what}: hidden_states={states} are not ascending indices from 0 to layers={config.layers}: change them"
        )


def _forward(
    model: Decoder,
    declared: Decoder,
    run: Run,
    *,
    features: Float[Array, "rows embed"] | None = None,
    **rows: Array,
) -> tuple[Float[Array, "batch seq vocab"] | None, Float[Array, "state batch part_seq embed"] | None]:
    """One device's logits and hidden states."""
    layers, states = model.config.layers, run.hidden_states
    model = gather_ends(model, declared)
    embedded = enter(model, rows, features, run=run)
    embedded, (table, norm, head) = layout.in_turn(embedded, (model.embed, model.norm, model.head))
    model = dataclasses.replace(model, embed=table, norm=norm, head=head)
    run_stage = functools.partial(stage, declared=declared, run=run)
    rounds = pipeline.rounds_of(declared)
    x, kept = pipeline.through(run_stage, model.blocks, embedded, rows, microbatches=run.microbatches, rounds=rounds)
    if states is not None and states[0] == 0:
        kept = kept.at[0].set(embedded)
    if states is not None and states[-1] < layers and not run.logits:
        return None, kept
    x = model.norm(x)
    if states is not None and states[-1] == layers:
        kept = kept.at[len(states) - 1].set(x)
    return model.logits(x, run.residual) if run.logits else None, kept


def enter(
    model: Decoder, rows: dict[str, Array], features: Float[Array, "rows embed"] | None = None, *, run: Run
) -> Float[Array, "batch part_seq embed"]:
    """The stream before the first block, the same on every device of `pipe`."""
    x = model.embed(rows["tokens"], run.dtype, run.residual, in_place=run.in_place)
    return with_features(x, features, own_places(rows, run.residual))


def stage(
    blocks: Block,
    x: Float[Array, "batch part_seq embed"],
    rows: dict[str, Array],
    first: Int[Array, ""] | int,
    *,
    declared: Decoder,
    run: Run,
) -> tuple[Float[Array, "batch part_seq embed"], Float[Array, "state batch part_seq embed"] | None]:
    """The stream after some of the blocks, from block `first` on, and the hidden states wanted of those after them."""
    config, held = declared.config, jax.tree.leaves(blocks)[0].shape[0]
    layers = _last(config, run) if lax.axis_size(PIPE) == 1 else held  # all stages run alike
    positions = rows.get("positions")
    positions = sequence_positions(rows["tokens"].shape[1]) if positions is None else positions
    turn = rotary(config.rope, config.head_dim, positions)
    lengths, mask, slots = rows.get("lengths"), rows.get("mask"), _slots(config, run.hidden_states)
    kept = None if slots is None else varying_like(jnp.zeros((len(run.hidden_states) + 1, *x.shape), x.dtype), x)

    def body(carry, inputs):
        x, kept = carry
        block, index = inputs
        layer = first + index
        # Of more blocks than are run each is read where it lies: to cut the others off would copy those that are run.
        block = block_at(blocks, index) if run.in_place else _block(blocks, index) if block is None else block
        block = layout.gather_at_rest(block, declared.blocks, narrow=narrow)
        q, kv = block.project(x, turn, run.residual)
        window = window_of(config, layer)
        attended = attention(q, kv, causal=True, **window, lengths=lengths, key_mask=mask)
        x = block.finish(x, attended, run.residual)
        if slots is not None:
            kept = lax.dynamic_update_index_in_dim(kept, x, slots[layer + 1], 0)
        return (x, kept), None

    narrow = dict.fromkeys(linear_layers(declared.blocks), x.dtype)
    given = None if run.in_place or held != layers else blocks
    (x, kept), _ = lax.scan(rematerialised(body, run.remat), (x, kept), (given, jnp.arange(layers)))
    return x, None if kept is None else kept[:-1]


def _block(blocks: Block, layer: Int[Array, ""]) -> Block:
    return jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, layer, keepdims=False), blocks)


def _slots(config: Config, states: tuple[int, ...] | None) -> Int[Array, " states"] | None:
    """Where each hidden state is kept: its place among those wanted, or the place after them, which is thrown away."""
    if states is None:
        return None
    return jnp.asarray([states.index(i) if i in states else len(states) for i in range(config.layers + 1)])


def gather_ends(model: Decoder, declared: Decoder, *, to: str = "varying") -> Decoder:
    """The model with everything but its blocks gathered from a split at rest."""
    return layout.gather_parts(model, declared, ("embed", "norm", "head"), to=to)


@runtime_checkable
class Encode(Protocol):
    """See `encode`."""

    def __call__(
        self,
        model: Decoder,
        tokens: Int[Host, "batch seq"],
        mask: Bool[Host, "batch seq"] | None = None,
        *,
        positions: Int[Host, "batch seq *axes"] | None = None,
        features: Float[Host, "rows embed"] | None = None,
        places: Int[Host, "batch seq"] | None = None,
    ) -> Float[Array, "batch seq width"]: ...


def encode(
    declared: Decoder,
    mesh: Mesh | AbstractMesh,
    *,
    layers: tuple[int, ...] | None = None,
    residual: Residual = "whole",
    dtype: Any = None,
    in_place: bool = False,
) -> Encode:
    """The decoder as an encoder of text: the pure function `f(model, tokens, mask, *, positions, features, places)`.

    It returns [batch, seq, width], split like batch and seq: for each token its states after the chosen layers one
    after another, width = len(layers) * embed, on padding as well, as transformers has them. Blocks after the last of
    the layers and the head are not run: the model may be one of `encoder_part(declared, layers)`, which lacks them.

    f's arguments are those of `forward`; `mask` is True for tokens of the prompt, on whichever side the padding is.

    Args:
        layers: hidden states as transformers counts them, in ascending order: 0 is the embedding, i the stream after
            block i. None is the last one, which comes after the final norm.
        residual, dtype, in_place: as in `forward`.

    Raises:
        InputError: as `forward`.
    """
    states = (declared.config.layers,) if layers is None else layers
    _check_states("decoder.encode", declared.config, states, logits=False)
    headless = dataclasses.replace(declared, head=None)
    run = forward(headless, mesh, residual=residual, dtype=dtype, hidden_states=states, logits=False, in_place=in_place)

    @jaxtyped(typechecker=beartype)
    def f(
        model: Decoder,
        tokens: Int[Host, "batch seq"],
        mask: Bool[Host, "batch seq"] | None = None,
        *,
        positions: Int[Host, "batch seq *axes"] | None = None,
        features: Float[Host, "rows embed"] | None = None,
        places: Int[Host, "batch seq"] | None = None,
    ) -> Float[Array, "batch seq width"]:
        model = dataclasses.replace(model, head=None)
        hidden = run(model, tokens, mask=mask, positions=positions, features=features, places=places)
        return jnp.concatenate(list(hidden), axis=-1)

    return f


def encoder_part(declared: Decoder, layers: tuple[int, ...] | None = None) -> Decoder:
    """The declaration of what `encode` reads: the blocks up to the last of `layers`, and no head.

    A checkpoint of the whole model restores to it, so that the rest is never loaded.
    """
    states = (declared.config.layers,) if layers is None else layers
    _check_states("decoder.encoder_part", declared.config, states, logits=False)
    blocks = jax.tree.map(lambda p: dataclasses.replace(p, shape=(states[-1], *p.shape[1:])), declared.blocks)
    return dataclasses.replace(declared, blocks=blocks, head=None)


LLAMA3 = Rope(theta=500000.0, scaling="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA32 = dataclasses.replace(LLAMA3, factor=32.0)
MILLION = Rope(theta=1000000.0)


def _smollm2(embed: int, layers: int, heads: int, kv_heads: int, mlp: int, theta: float, eps: float = 1e-5) -> Config:
    return Config(
        vocab=49152, embed=embed, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=64, mlp=mlp,
        norm_eps=eps, rope=Rope(theta=theta), tied=True, max_positions=8192,
    )  # fmt: skip


PRESETS = {
    "smollm2-135m": _smollm2(576, 30, 9, 3, 1536, 100000.0),
    "smollm2-360m": _smollm2(960, 32, 15, 5, 2560, 100000.0),
    "smollm2-1.7b": _smollm2(2048, 24, 32, 32, 8192, 130000.0),
    "llama-3.1-8b": Config(
        vocab=128256, embed=4096, layers=32, heads=32, kv_heads=8, head_dim=128, mlp=14336, rope=LLAMA3
    ),
    "llama-3.2-1b": Config(
        vocab=128256, embed=2048, layers=16, heads=32, kv_heads=8, head_dim=64, mlp=8192, rope=LLAMA32, tied=True
    ),
    "llama-3.2-3b": Config(
        vocab=128256, embed=3072, layers=28, heads=24, kv_heads=8, head_dim=128, mlp=8192, rope=LLAMA32, tied=True
    ),
    "mistral-7b-v0.3": Config(
        vocab=32768, embed=4096, layers=32, heads=32, kv_heads=8, head_dim=128, mlp=14336, rope=MILLION,
        max_positions=32768,
    ),
    "mistral-small-3.2-24b": Config(
        vocab=131072, embed=5120, layers=40, heads=32, kv_heads=8, head_dim=128, mlp=32768, rope=Rope(theta=1e9)
    ),
    "qwen2.5-0.5b": Config(
        vocab=151936, embed=896, layers=24, heads=14, kv_heads=2, head_dim=64, mlp=4864, norm_eps=1e-6, rope=MILLION,
        qkv_bias=True, tied=True, max_positions=32768,
    ),
    "qwen2.5-7b": Config(
        vocab=152064, embed=3584, layers=28, heads=28, kv_heads=4, head_dim=128, mlp=18944, norm_eps=1e-6, rope=MILLION,
        qkv_bias=True,
    ),
    "qwen2.5-vl-7b": Config(
        vocab=152064, embed=3584, layers=28, heads=28, kv_heads=4, head_dim=128, mlp=18944, norm_eps=1e-6,
        rope=Rope(theta=1e6, sections=(16, 24, 24)), qkv_bias=True, max_positions=128000,
    ),
    "qwen3-4b": Config(
        vocab=151936, embed=2560, layers=36, heads=32, kv_heads=8, head_dim=128, mlp=9728, norm_eps=1e-6, rope=MILLION,
        qk_norm=True, tied=True, max_positions=40960,
    ),
    "qwen3-8b": Config(
        vocab=151936, embed=4096, layers=36, heads=32, kv_heads=8, head_dim=128, mlp=12288, norm_eps=1e-6, rope=MILLION,
        qk_norm=True, max_positions=40960,
    ),
}  # fmt: skip


def trace(declared: Decoder, mesh: Mesh | AbstractMesh, sizes: TraceSizes, **run: Any) -> tuple[Callable, tuple]:
    """Logits of whole sequences, as `Family.trace` says."""
    return forward(declared, mesh, **run), (jax.ShapeDtypeStruct((sizes.batch, sizes.tokens), jnp.int32),)


register(
    Family(
        name="decoder",
        config=Config,
        declare=declare,
        presets=PRESETS,
        trace=trace,
        text="shardzoo.zoo.generate",  # by name: it imports this module
    )
)
