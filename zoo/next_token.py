"""Choosing the next token from logits: greedy, or with temperature, top-k and top-p."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from shardzoo.errors import fail_if

COLD = 1e-30  # a temperature below which logits overflow float32: the likeliest token is all that it leaves


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen.

    Attributes:
        temperature: 0 takes the likeliest token; else logits are divided by it.
        top_k: only the k likeliest tokens; None is all.
        top_p: of those, only the likeliest whose probabilities together reach p (at least one); None is all.
    """

    temperature: float | int = 0.0
    top_k: int | None = None
    top_p: float | int | None = None

    def __post_init__(self):
        problems = []
        if not self.temperature >= 0:
            problems.append(f"temperature={self.temperature} is below 0: use 0 for the likeliest token")
        if self.top_k is not None and self.top_k < 1:
            problems.append(f"top_k={self.top_k} is not at least 1: use None for all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            problems.append(f"top_p={self.top_p} is not in (0, 1]: use None for all tokens")
        fail_if(problems, "sampling")


def choose(
    logits: Float[Array, "batch vocab"],
    sampling: Sampling,
    key: Key[Array, ""],
    rows: Int[Array, " batch"],
    step: Int[Array, ""],
) -> Int[Array, " batch"]:
    """The next token of each row, int32; ties go to the lowest id.

    The noise depends on `key`, the row's number in the whole batch and the step, and on nothing else: not on the mesh,
    nor on the other rows.
    """
    logits = logits.astype(jnp.float32)
    if sampling.temperature < COLD:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    scaled, ids = _candidates(logits / sampling.temperature, sampling)
    noise = _noise(key, rows, step, logits.shape[-1])
    noise = noise if ids is None else jnp.take_along_axis(noise, ids, axis=-1)
    chosen = jnp.argmax(scaled + noise, axis=-1)
    return (chosen if ids is None else jnp.take_along_axis(ids, chosen[:, None], axis=-1)[:, 0]).astype(jnp.int32)


def _candidates(
    scaled: Float[Array, "batch vocab"], sampling: Sampling
) -> tuple[Float[Array, "batch kept"], Int[Array, "batch kept"] | None]:
    """Logits of the tokens to choose among, -inf for those that are out, and their ids (None: all, in order)."""
    vocab = scaled.shape[-1]
    if sampling.top_k is None and sampling.top_p is None:
        return scaled, None
    scaled, ids = jax.lax.top_k(scaled, min(sampling.top_k or vocab, vocab))
    if sampling.top_p is not None:
        share = jax.nn.softmax(scaled, axis=-1)
        before = jnp.cumsum(share, axis=-1) - share
        scaled = jnp.where(before < sampling.top_p, scaled, -jnp.inf)
    return scaled, ids


def _noise(
    key: Key[Array, ""], rows: Int[Array, " batch"], step: Int[Array, ""], vocab: int
) -> Float[Array, "batch _"]:
    keys = jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(key, row), step))(rows)
    return jax.vmap(lambda k: jax.random.gumbel(k, (vocab,), jnp.float32))(keys)
