"""Rotary position embedding: pairs (i, i + head_dim / 2) of a head turn by position * frequency_i.

This is the half-split pairing of the transformers library. Files that pair neighbours (2i, 2i + 1) hold the rows of q
and k in another order; their converter rules reorder them.
"""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from shardzoo.errors import fail_if, not_above_zero


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Base and long-context scaling of the frequencies.

    Attributes:
        theta: base.
        scaling: "none"; "linear" divides every frequency by `factor`; "llama3" divides those whose wave is longer than
            `original_positions / low_freq_factor`, keeps those whose wave is shorter than
            `original_positions / high_freq_factor`, and blends in between (Llama 3.1).
        factor, low_freq_factor, high_freq_factor, original_positions: its numbers.
        sections: how many pairs each axis of a position turns, one axis after another, where positions have several
            (frame, row and column of a token of an image); () where they are single numbers.
    """

    theta: float = 10000.0
    scaling: Literal["none", "linear", "llama3"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192
    sections: tuple[int, ...] = ()

    def __post_init__(self):
        problems = []
        if self.scaling not in ("none", "linear", "llama3"):
            problems.append(f"scaling={self.scaling!r} is unknown: use none, linear or llama3")
        problems += not_above_zero(self, "theta", "factor", "low_freq_factor", "high_freq_factor", "original_positions")
        if self.scaling == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            low, high = self.low_freq_factor, self.high_freq_factor
            problems.append(f"low_freq_factor={low} is not below high_freq_factor={high}: swap them")
        problems += [f"sections={self.sections}: {n} is below 0: change it" for n in self.sections if n < 0]
        fail_if(problems, "rope")


def frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Angle per position of each pair, float32 (head_dim / 2), computed in float32 as the reference does."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    plain = (np.float32(1) / np.float32(rope.theta) ** exponents).astype(np.float32)
    if rope.scaling == "none":
        return plain
    scaled = (plain / np.float32(rope.factor)).astype(np.float32)
    return scaled if rope.scaling == "linear" else _llama3(rope, plain, scaled)


def _llama3(rope: Rope, plain: np.ndarray, scaled: np.ndarray) -> np.ndarray:
    turns = rope.original_positions * plain / np.float32(2 * math.pi)  # in the length the model was first trained on
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    share = np.clip(keep, 0, 1).astype(np.float32)
    return ((1 - share) * scaled + share * plain).astype(np.float32)


Rotary = tuple[Float[Array, "rows seq half"], Float[Array, "rows seq half"]]


def rotary(rope: Rope, head_dim: int, positions: Int[Array, "rows seq *axes"]) -> Rotary:
    """Cosine and sine of each position's angles, float32; `rows` is the batch, or 1 if all rows share positions.

    Positions along several axes have one more dim, and the rope has sections.
    """
    by_axis = positions.ndim == 3
    read = np.repeat(np.arange(len(rope.sections)), rope.sections) if by_axis else None
    angles = (positions[..., read]).astype(jnp.float32) * frequencies(rope, head_dim)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Float[Array, "batch seq heads head_dim"], turn: Rotary) -> Float[Array, "batch seq heads head_dim"]:
    """x with each pair turned by its position's angle; float32 inside."""
    cos, sin = (table[:, :, None] for table in turn)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
