"""What the passes of language models share: what they are given, how that is checked, padded and split over a mesh.

A family's `forward` says how one device runs; the function that it returns is a `Forward`, made here. The gradient by
stages is in `pipeline_gradients`.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from beartype import beartype
from jax import P, lax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Bool, Float, Int, jaxtyped

from shardzoo.errors import fail_if
from shardzoo.zoo import layout, pipeline
from shardzoo.zoo.families import config_changes
from shardzoo.zoo.layers import Residual, check_residual, own_share
from shardzoo.zoo.mesh import CONTEXT, DATA, TP
from shardzoo.zoo.remat import Remat, check_remat

Host = Array | np.ndarray  # what the public functions take
Problems = Callable[..., Iterator[str]]  # what is wrong with (model, **inputs), the latter as `Forward` has them


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """How one device runs; the options are explained in a family's `forward`."""

    residual: Residual = "whole"
    remat: Remat = False
    dtype: Any = None
    microbatches: int = 1


@runtime_checkable
class Forward(Protocol):
    """A forward pass on a mesh: a pure function, to be jitted. Any batch and length will do.

    Both are padded to what the mesh needs, and the result is cut back. The arguments, beside the live model and the
    tokens:
        lengths: valid prefix of each row (rows padded on the right); results beyond it mean nothing.
        mask: True for tokens that others may see, for padding on any side; results on padding are those of the
            transformers library. Not with `lengths`.
        positions: of the tokens, for the rotation only; 0, 1, 2 ... if not given. Those along several axes are
            [batch, seq, axis].
        features, places: what stands in for embeddings, such as the states of an image: `places` says for each token
            which row of `features` replaces its embedding, or -1. Both or neither.
    """

    def __call__(
        self,
        model: Any,
        tokens: Int[Host, "batch seq"],
        *,
        lengths: Int[Host, " batch"] | None = None,
        mask: Bool[Host, "batch seq"] | None = None,
        positions: Int[Host, "batch seq *axes"] | None = None,
        features: Float[Host, "rows embed"] | None = None,
        places: Int[Host, "batch seq"] | None = None,
    ) -> Any: ...


def forward(
    what: str,
    declared: Any,
    mesh: Mesh | AbstractMesh,
    one_device: Callable[..., Any],
    *,
    problems: Problems,
    out_specs: Any,
    residual: Residual,
    microbatches: int | None,
) -> Forward:
    """The pass of which `one_device(model, microbatches, **inputs)` is one device's share; `what` is asked for it.

    Its results have batch and sequence before their last dim.
    """
    sequence = {name: P(DATA, CONTEXT) for name in ("tokens", "mask", "positions", "places")}
    split = {**sequence, "lengths": P(DATA), "features": P()}
    seq_ways = seq_ways_of(mesh, residual)

    @jaxtyped(typechecker=beartype)
    def f(
        model: Any,
        tokens: Int[Host, "batch seq"],
        *,
        lengths: Int[Host, " batch"] | None = None,
        mask: Bool[Host, "batch seq"] | None = None,
        positions: Int[Host, "batch seq *axes"] | None = None,
        features: Float[Host, "rows embed"] | None = None,
        places: Int[Host, "batch seq"] | None = None,
    ) -> Any:
        given = {"lengths": lengths, "mask": mask, "positions": positions, "places": places}
        wrong = [*not_declared(declared, model), *no_tokens(tokens)]
        fail_if(wrong or problems(model, features=features, **given), what)
        rows = {name: x for name, x in {"tokens": tokens, **given}.items() if x is not None}
        cut = pipeline.microbatches_for(microbatches, mesh, tokens.shape[0])
        arrays = {name: pad(jnp.asarray(x), mesh.shape[DATA] * cut, seq_ways) for name, x in rows.items()}
        arrays |= {} if features is None else {"features": jnp.asarray(features)}
        shard = layout.sharded(
            lambda model, arrays: one_device(model, cut, **arrays),
            mesh,
            (layout.specs(declared), {name: split[name] for name in arrays}),
            out_specs,
        )
        return jax.tree.map(lambda x: _cut(x, tokens.shape), shard(model, arrays))

    return f


def check_run(
    what: str, declared: Any, mesh: Mesh | AbstractMesh, residual: str, remat: Remat, microbatches: int | None
) -> None:
    """Refuses a mesh or options that a language model's pass cannot run with; `what` is asked for it.

    Raises:
        InputError: as said.
    """
    layout.audit(declared, mesh)
    pipeline.check_microbatches(what, microbatches)
    check_residual(what, residual)
    check_remat(what, remat)


def not_declared(declared: Any, model: Any) -> list[str]:
    """Whether a model is of another kind or config than the declaration that a function was made for."""
    if type(model) is not type(declared):
        return [f"model: is a {type(model).__name__}, declared is a {type(declared).__name__}: give that"]
    changes = config_changes(declared.config, model.config)
    return [f"model.config is not the declared one: {change}: declare it as it is" for change in changes]


def no_tokens(tokens: Host) -> list[str]:
    """Whether there are no tokens at all."""
    rows, seq = tokens.shape
    return [] if rows and seq else [f"tokens: {rows} rows of {seq} are none: give at least one"]


def input_problems(embed: int, *, lengths=None, mask=None, features=None, places=None) -> Iterator[str]:
    """What is wrong with the inputs of a forward pass, or of a prompt, whatever the model's rotation."""
    if lengths is not None and mask is not None:
        yield "lengths and mask were both given: give one of them"
    if (features is None) != (places is None):
        yield "features and places go together: give both or neither"
    if features is not None and features.shape[1] != embed:
        yield f"features: width {features.shape[1]} is not the model's embed={embed}: give those of this model"


def seq_ways_of(mesh: Mesh | AbstractMesh, residual: Residual) -> int:
    """What the sequence must divide by."""
    return mesh.shape[CONTEXT] * (1 if residual == "whole" else mesh.shape[TP[0]] * mesh.shape[TP[1]])


def pad(x: Array, batch_ways: int, seq_ways: int) -> Array:
    """x with zeros added until its batch, and its sequence if it has one, divide."""
    ways = (batch_ways, seq_ways, *[1] * x.ndim)[: x.ndim]
    extra = [(0, -size % way) for size, way in zip(x.shape, ways, strict=True)]
    return jnp.pad(x, extra) if any(after for _, after in extra) else x


def _cut(x: Array, sizes: tuple[int, ...]) -> Array:
    """x without what was added to batch and sequence, which are before its last dim."""
    for dim, size in enumerate(sizes, x.ndim - 3):
        x = x if x.shape[dim] == size else lax.slice_in_dim(x, 0, size, axis=dim)
    return x


def sequence_positions(seq: int) -> Int[Array, "one seq"]:
    """Global positions of this device's share of the sequence."""
    return (lax.axis_index(CONTEXT) * seq + jnp.arange(seq, dtype=jnp.int32))[None]


def own_places(rows: Mapping[str, Array], residual: Residual) -> Int[Array, "batch part_seq"] | None:
    """The places of the tokens that this device's part of the stream is of."""
    places = rows.get("places")
    return places if places is None or residual == "whole" else own_share(places, TP)


def with_features(
    x: Float[Array, "batch part_seq embed"],
    features: Float[Array, "rows embed"] | None,
    places: Int[Array, "batch part_seq"] | None,
) -> Float[Array, "batch part_seq embed"]:
    """The stream with rows of `features` at the tokens that have a place."""
    if features is None or places is None:
        return x
    return jnp.where(places[..., None] < 0, x, features.astype(x.dtype)[jnp.maximum(places, 0)])
