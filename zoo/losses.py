"""Losses: next-token cross-entropy, and flow matching for diffusion transformers.

They take what `forward` returns as it lies on the mesh, are called outside of any `shard_map`, inside the function that
the gradient is taken of, and reduce in float32:

    def loss(model, tokens, key):
        logits = forward(model, tokens)
        labels, mask = losses.next_tokens(tokens)
        return losses.cross_entropy(logits, labels, mask)

Cross-entropy over a split vocabulary reads each logit where it lies: it multiplies, compares and sums along the
vocabulary, so that the mesh exchanges one number for each token and sum (a maximum, two sums), never logits.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from beartype import beartype
from jaxtyping import Array, Bool, Float, Int, Key, Num, jaxtyped

from shardzoo.errors import InputError, fail_if

Host = Array | np.ndarray


@jaxtyped(typechecker=beartype)
def next_tokens(
    tokens: Int[Host, "batch seq"],
    lengths: Int[Host, " batch"] | None = None,
    mask: Bool[Host, "batch seq"] | None = None,
) -> tuple[Int[Array, "batch seq"], Bool[Array, "batch seq"]]:
    """The token after each one, and where it counts: labels as long as the tokens, so that no logits are moved.

    Args:
        lengths: valid prefix of each row, as `forward` takes it.
        mask: True for tokens to be predicted, such as those of the replies of a conversation; the first of a row never
            is. With `lengths` only those within them.

    Returns:
        labels and a mask of them; the last place of each row predicts nothing.
    """
    tokens = jnp.asarray(tokens)
    seq = tokens.shape[1]
    wanted = jnp.ones(tokens.shape, bool) if mask is None else jnp.asarray(mask)
    if lengths is not None:
        wanted &= jnp.arange(seq)[None] < jnp.asarray(lengths)[:, None]
    following = jnp.roll(wanted, -1, axis=1) & (jnp.arange(seq)[None] < seq - 1)
    return jnp.roll(tokens, -1, axis=1), following


@jaxtyped(typechecker=beartype)
def cross_entropy(
    logits: Float[Host, "*tokens vocab"],
    labels: Int[Host, "*tokens"],
    mask: Bool[Host, "*tokens"] | None = None,
) -> Float[Array, ""]:
    """The mean of -log softmax(logits)[label] over the labels that count, float32.

    Labels outside of the vocabulary (-100, as other libraries mark them) do not count, nor do those that `mask` hides;
    the mean of none is 0. Logits may be of any dtype and are kept for the backward pass as they are, with one number a
    token beside them.
    """
    counts = (jnp.asarray(labels) >= 0) & (jnp.asarray(labels) < logits.shape[-1])
    counts = counts if mask is None else counts & jnp.asarray(mask)
    each = token_losses(jnp.asarray(logits), jnp.asarray(labels))
    total = jnp.sum(jnp.where(counts, each, 0.0))
    return total / jnp.maximum(jnp.sum(counts, dtype=jnp.int32), 1).astype(each.dtype)


@jax.custom_vjp
def token_losses(logits: Float[Array, "*tokens vocab"], labels: Int[Array, "*tokens"]) -> Float[Array, "*tokens"]:
    """-log softmax(logits)[label] of each token, in float32 at least; a label out of range gives log(sum(exp))."""
    return _forward(logits, labels)[0]


def _forward(logits: Array, labels: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    wide = np.promote_types(logits.dtype, np.float32)
    top = jnp.max(logits, axis=-1, keepdims=True).astype(wide)
    total = jnp.sum(jnp.exp(logits.astype(wide) - top), axis=-1)
    lse = jnp.log(total) + top[..., 0]
    chosen = jnp.sum(jnp.where(_is_label(logits, labels), logits.astype(wide), 0), axis=-1)
    return lse - chosen, (logits, labels, lse)


def _backward(kept: tuple[Array, Array, Array], cotangent: Array) -> tuple[Array, None]:
    """(softmax - one-hot) * cotangent: from the logits again, so that nothing of their size is kept beside them."""
    logits, labels, lse = kept
    share = jnp.exp(logits.astype(lse.dtype) - lse[..., None])
    change = share - _is_label(logits, labels).astype(lse.dtype)
    return (change * cotangent[..., None]).astype(logits.dtype), None


token_losses.defvjp(_forward, _backward)


def _is_label(logits: Array, labels: Array) -> Bool[Array, "*tokens vocab"]:
    """Where a logit is that of its token's label: a comparison and no gather, which would move a split vocabulary."""
    return jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1) == labels[..., None]


class Noisy(NamedTuple):
    """A sample of the path from data to noise, and what a model has to say of it.

    Attributes:
        sample: (1 - level) * data + level * noise, in the data's dtype.
        levels: one for each row, float32; the timesteps of Wan are these times `sampling.TRAIN_STEPS`, those of FLUX
            and Qwen-Image these themselves.
        velocity: noise - data, the target, float32.
    """

    sample: Float[Array, "batch ..."]
    levels: Float[Array, " batch"]
    velocity: Float[Array, "batch ..."]


@jaxtyped(typechecker=beartype)
def add_noise(
    data: Float[Host, "batch ..."],
    key: Key[Array, ""],
    *,
    density: str = "uniform",
    shift: float | int | Float[Array, ""] = 1.0,
    levels: Float[Host, " batch"] | None = None,
) -> Noisy:
    """Data at random noise levels: what a step of flow matching shows a model.

    The draw depends on key and shapes alone, not on the mesh.

    Args:
        density: of the levels: "uniform" in (0, 1), or "logit-normal", the sigmoid of a normal number, which prefers
            the middle.
        shift: moves levels towards noise, as `sampling.euler` does: level -> shift * level / (1 + (shift - 1) * level).
            `exp(sampling.image_mu(tokens))` is FLUX.1's for images of so many tokens; 3 to 8 are Wan's.
        levels: those to use, in place of random ones; from 0 (data) to 1 (noise).

    Raises:
        InputError: an unknown density; a shift that is not above 0.
    """
    _check(density, shift)
    levels = None if levels is None else jnp.asarray(levels, jnp.float32)
    by_level, by_noise = jax.random.split(key)
    if levels is None:
        levels = shifted(_drawn(by_level, data.shape[0], density), shift)
    noise = jax.random.normal(by_noise, data.shape, jnp.float32)
    wide = jnp.asarray(data).astype(jnp.float32)
    level = levels.reshape(-1, *[1] * (data.ndim - 1))
    return Noisy(((1 - level) * wide + level * noise).astype(data.dtype), levels, noise - wide)


def _check(density: str, shift: object) -> None:
    problems = []
    if density not in ("uniform", "logit-normal"):
        problems.append(f"density={density!r} is unknown: use 'uniform' or 'logit-normal'")
    if isinstance(shift, int | float) and not shift > 0:
        problems.append(f"shift={shift} is not above 0: use 1 for none")
    fail_if(problems, "losses.add_noise")


def _drawn(key: Array, rows: int, density: str) -> Float[Array, " rows"]:
    if density == "uniform":
        return jax.random.uniform(key, (rows,), jnp.float32)
    return jax.nn.sigmoid(jax.random.normal(key, (rows,), jnp.float32))


def shifted(levels: Float[Array, "*shape"], shift: float | int | Float[Array, ""]) -> Float[Array, "*shape"]:
    """Noise levels moved towards noise: shift * level / (1 + (shift - 1) * level)."""
    return shift * levels / (1 + (shift - 1) * levels)


@jaxtyped(typechecker=beartype)
def flow_matching(
    predicted: Float[Host, "batch ..."],
    velocity: Float[Host, "batch ..."],
    weights: Num[Host, " batch"] | None = None,
) -> Float[Array, ""]:
    """The mean of (predicted - velocity)^2 over all values, float32.

    `weights` are factors of the rows, such as some schemes take by noise level; they are not normalised.
    """
    if predicted.shape != velocity.shape:
        raise InputError(
            f"losses.flow_matching: predicted {predicted.shape} is not the velocity's {velocity.shape}: pass the noise"
            " minus the data of what the model was given"
        )
    wide = np.promote_types(predicted.dtype, np.float32)
    square = jnp.square(jnp.asarray(predicted).astype(wide) - jnp.asarray(velocity).astype(wide))
    rows = jnp.mean(square.reshape(square.shape[0], -1), axis=1)
    return jnp.mean(rows if weights is None else rows * jnp.asarray(weights).astype(wide))
