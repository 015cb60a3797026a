"""The text encoder of CLIP: a causal transformer that gives the state at the end of a text, or one of all tokens.

Source: CLIPTextModel of transformers 5; FLUX.1 takes the pooled output of CLIP-L. `clip.py` has its blocks.

Mesh axes: the batch over `data`, heads, mlp and vocabulary over the tensor axes; `pipe` must be 1. Texts are short (77
tokens), so that they are never split: every device of `context` computes the same. Shapes inside layers are one
device's. The blocks are stacked and run by one `lax.scan`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from beartype import beartype
from jax import P
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Bool, Float, Int, jaxtyped

from shardzoo.errors import InputError, fail_if, nothing_in
from shardzoo.zoo import layout
from shardzoo.zoo.clip import Activation, Block, blocks_to_run, declare_norm, gathered, run_blocks, size_problems
from shardzoo.zoo.dtypes import float_dtype
from shardzoo.zoo.families import Family, TraceSizes, register
from shardzoo.zoo.layers import Embedding, LayerNorm, Leaf, pad
from shardzoo.zoo.layout import Param
from shardzoo.zoo.mesh import DATA, TP

Host = Array | np.ndarray  # what the public functions take
NAMED = ("last", "pooled")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and variants.

    Attributes:
        vocab, embed, mlp, layers, heads: sizes; embed divides by heads.
        positions: of the table, the most tokens that a text may have.
        activation: "quick_gelu", x * sigmoid(1.702 x), or "gelu" (with the error function).
        end_token: a text ends at the first of these; None where it ends at its highest id, as models do whose config
            says that the end token is 2, which it is not.
        norm_eps: of every layer norm.
    """

    vocab: int
    embed: int
    mlp: int
    layers: int
    heads: int
    positions: int = 77
    activation: Activation = "quick_gelu"
    end_token: int | None = None
    norm_eps: float = 1e-5

    def __post_init__(self):
        fail_if(
            size_problems(self, ("vocab", "embed", "mlp", "layers", "heads", "positions")),
            "clip_text config",
        )


def ends(ids: Int[Array, "batch seq"], end_token: int | None) -> Int[Array, " batch"]:
    """Where each text ends: at its first end token (at its first token if it has none), or at its highest id."""
    return jnp.argmax(ids if end_token is None else ids == end_token, axis=1)


class Encoder(eqx.Module):
    """Tokens and positions, stacked blocks, and the norm after the last of them."""

    embed: Embedding
    positions: Float[Leaf, "seq embed"]
    blocks: Block
    norm: LayerNorm
    config: Config = eqx.field(static=True)

    @classmethod
    def declare(cls, c: Config) -> "Encoder":
        return cls(
            embed=Embedding(Param("vocab embed", (c.vocab, c.embed), {"vocab": TP})),
            positions=Param("seq embed", (c.positions, c.embed)),
            blocks=layout.stack(Block.declare(c, causal=True), c.layers),
            norm=declare_norm(c),
            config=c,
        )


def declare(config: Config, dtype: Any = np.float32) -> Encoder:
    """The declared encoder with every weight in `dtype`."""
    return layout.astype(Encoder.declare(config), dtype)


@runtime_checkable
class Forward(Protocol):
    """See `forward`."""

    def __call__(
        self, model: Encoder, ids: Int[Host, "batch seq"], *, mask: Bool[Host, "batch seq"] | None = None
    ) -> Float[Array, "batch *tokens embed"]: ...


def forward(
    declared: Encoder,
    mesh: Mesh | AbstractMesh,
    *,
    hidden_state: int | Literal["last", "pooled"] = "pooled",
    dtype: Any = None,
) -> Forward:
    """The pure function `f(model, ids, *, mask)`: jit it, or call it inside a jitted function.

    The result is [batch, embed] or [batch, seq, embed], split like the batch over `data` and the same along `context`.
    Any batch and any length up to the table of positions will do: the batch is padded to what the mesh needs, and the
    result is cut back.

    f's arguments, beside the live model and the token ids:
        mask: False for tokens that no other sees. Texts padded on the right need none, as no token sees those after it:
            it changes the states of padding alone, and where a text ends not at all.

    Args:
        hidden_state: "pooled" is the state at the end of the text after the last block, normed, [batch, embed]; "last"
            that of all tokens, normed. A number is counted as transformers does: 0 the tokens with their positions, i
            the stream after block i, -1 after the last, with no norm. Later blocks are not run.
        dtype: of the activations; None is that of the weights.

    Raises:
        InputError: the mesh does not fit the declaration; no such hidden state; from f, texts that are too long.
    """
    layout.audit(declared, mesh)
    config = declared.config
    run = blocks_to_run("clip_text.forward", hidden_state, NAMED, config.layers)
    dtype = float_dtype("clip_text.forward", dtype)

    @jaxtyped(typechecker=beartype)
    def f(
        model: Encoder, ids: Int[Host, "batch seq"], *, mask: Bool[Host, "batch seq"] | None = None
    ) -> Float[Array, "batch *tokens embed"]:
        batch, seq = ids.shape
        fail_if(nothing_in(ids=ids.shape), "clip_text.forward")
        if not 1 <= seq <= config.positions:
            raise InputError(
                f"clip_text.forward: seq={seq} is not within 1 and positions={config.positions}:"
                " truncate the text when tokenizing"
            )
        given = {"ids": ids} if mask is None else {"ids": ids, "mask": mask}
        arrays = {name: pad(jnp.asarray(x), 0, mesh.shape[DATA]) for name, x in given.items()}
        shard = layout.sharded(
            lambda model, arrays: _forward(model, declared, hidden_state, run, dtype, **arrays),
            mesh,
            (layout.specs(declared), dict.fromkeys(arrays, P(DATA))),
            P(DATA),
        )
        return shard(model, arrays)[:batch]

    return f


def _forward(
    model: Encoder,
    declared: Encoder,
    hidden_state: int | str,
    run: int,
    dtype: jnp.dtype | None,
    *,
    ids: Int[Array, "batch seq"],
    mask: Bool[Array, "batch seq"] | None = None,
) -> Float[Array, "batch *tokens embed"]:
    """One device's share of the batch after this many blocks."""
    config = model.config
    embed, positions, norm = gathered(
        (model.embed, model.positions, model.norm), (declared.embed, declared.positions, declared.norm)
    )
    x = embed(ids, dtype)
    x = x + positions[: ids.shape[1]].astype(x.dtype)
    x = run_blocks(model.blocks, declared.blocks, x, run=run, of=config.layers, mask=mask)
    if hidden_state not in NAMED:
        return x
    return norm(x if hidden_state == "last" else x[jnp.arange(len(x)), ends(ids, config.end_token)])


PRESETS = {"clip-l": Config(vocab=49408, embed=768, mlp=3072, layers=12, heads=12)}


def trace(declared: Encoder, mesh: Mesh | AbstractMesh, sizes: TraceSizes, **run: Any) -> tuple[Callable, tuple]:
    """The pooled output of texts of the most tokens that there may be, as `Family.trace` says."""
    ids = jax.ShapeDtypeStruct((sizes.batch, min(sizes.tokens, declared.config.positions)), jnp.int32)
    return forward(declared, mesh, **run), (ids,)


register(Family(name="clip-text", config=Config, declare=declare, presets=PRESETS, trace=trace))
