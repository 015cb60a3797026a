"""Keys and values of the tokens so far, for all layers, with the sequence split over `context`.

Each device of `context` keeps its own share of the prompt in its first slots, as prefill computed it there. The token
fed at decode step t is kept by device t % context, in the slot after those it already uses; the slot is the same for
all rows, and `positions` says what each slot of each row holds: ragged rows, padding and windows are only masks.

Heads lie flat beside each other, as the attention kernel of TPUs reads them, and slots are whole tiles: otherwise the
whole cache is copied into that order at the beginning of every program, and back at the end.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import P, lax
from jaxtyping import Array, Bool, Float, Int, Num

from shardzoo.kernels.flash_attention.options import varying_over
from shardzoo.zoo.in_place import block_at, from_storage, to_storage
from shardzoo.zoo.mesh import CONTEXT, DATA, KV, PIPE

EMPTY = -1  # position of a slot that holds nothing
TILE = 16  # rows of a tile of 16-bit numbers


class Cache(NamedTuple):
    """One device's keys and values (16-bit floats as integers on a CPU: `in_place.py`), and the slots' positions."""

    k: Num[Array, "layer batch slots channels"]
    v: Num[Array, "layer batch slots channels"]
    positions: Int[Array, "batch slots"]

    def write(
        self,
        layer: Int[Array, ""],
        slot: Int[Array, ""] | int,
        kv: Float[Array, "batch seq two kv_heads head_dim"],
        here: Bool[Array, ""] | None = None,
    ) -> "Cache":
        """With keys and values of a layer put into the slots from `slot` on, in place; unchanged where not `here`."""

        def put(into: Array, x: Array) -> Array:
            flat = to_storage(x.reshape(*x.shape[:2], -1))
            at, new = [jnp.asarray(i, jnp.int32) for i in (layer, 0, slot, 0)], flat[None]
            new = new if here is None else jnp.where(here, new, lax.dynamic_slice(into, at, new.shape))
            return lax.dynamic_update_slice(into, new, at)

        return self._replace(k=put(self.k, kv[:, :, 0]), v=put(self.v, kv[:, :, 1]))

    def read(self, layer: Int[Array, ""], head_dim: int, dtype: jnp.dtype) -> tuple[Array, Array]:
        """Keys and values of a layer, each (batch, slots, kv_heads, head_dim)."""
        k, v = (from_storage(x, dtype) for x in block_at((self.k, self.v), layer))
        heads = (*k.shape[:2], -1, head_dim)
        return k.reshape(heads), v.reshape(heads)

    def feed(self, now: Int[Array, " batch"], step: Int[Array, ""], steps: int) -> tuple["Cache", Int[Array, ""]]:
        """With the positions of the tokens fed at decode step `step` of `steps`, and the slot that is for them."""
        prompt_slots = self.positions.shape[1] - spare_slots(steps, lax.axis_size(CONTEXT))
        slot, kept = step_slot(prompt_slots, step)
        held = jnp.where(kept, now, EMPTY)[:, None]
        return self._replace(positions=lax.dynamic_update_slice_in_dim(self.positions, held, slot, 1)), slot

    def visible(self, now: Int[Array, " batch"], window: int | None) -> Int[Array, "batch slots"]:
        """0 for slots that a query at position `now` sees and -1 for others, as `cached_attention` takes them."""
        seen = self.positions != EMPTY
        if window is not None:
            seen &= self.positions > now[:, None] - window
        return jnp.where(seen, 0, -1)


CACHE_SPECS = Cache(
    k=P(PIPE, DATA, CONTEXT, KV),
    v=P(PIPE, DATA, CONTEXT, KV),
    positions=P(DATA, CONTEXT),
)


def spare_slots(steps: int, degree: int) -> int:
    """Slots that a device needs for `steps` decode steps: its share, and one for the tokens that others keep."""
    return whole_tiles(steps if degree == 1 else -(-steps // degree) + 1)


def whole_tiles(slots: int) -> int:
    """At least so many slots, in whole tiles of a TPU.

    Otherwise the dim that its compiler tiles by default is another one than the kernels read by, and the whole cache is
    copied into their order at the beginning of each program, and back at the end.
    """
    return -(-slots // TILE) * TILE


def empty(
    prompt: Int[Array, "rows seq"],
    lengths: Int[Array, " batch"],
    *,
    steps: int,
    layers: int,
    kv_heads: int,
    head_dim: int,
    dtype: jnp.dtype,
) -> Cache:
    """A cache for this share of the prompt and `steps` decode steps; sizes are one device's.

    `prompt` is the positions of the share, which the first slots are for; those of padding stay empty, and so do those
    that fill a tile.
    """
    batch = lengths.shape[0]
    slots = whole_tiles(prompt.shape[1]) + spare_slots(steps, lax.axis_size(CONTEXT))
    shape = (layers, batch, slots, kv_heads * head_dim)
    storage = varying_over(to_storage(jnp.zeros(shape, dtype)), frozenset({PIPE, DATA, CONTEXT, KV}))
    positions = varying_over(jnp.full((batch, slots), EMPTY, jnp.int32), frozenset({DATA, CONTEXT}))
    held = jnp.where(prompt < lengths[:, None], prompt, EMPTY)
    return Cache(k=storage, v=storage, positions=lax.dynamic_update_slice(positions, held, (0, 0)))


def step_slot(prompt_slots: int, step: Int[Array, ""]) -> tuple[Int[Array, ""], Bool[Array, ""]]:
    """Slot into which this device writes the token of decode step `step`, and whether it is the one that keeps it.

    A device that does not keep the token writes it where its own next one will go.
    """
    degree, rank = lax.axis_size(CONTEXT), lax.axis_index(CONTEXT)
    kept_before = (step - rank + degree - 1) // degree
    return prompt_slots + kept_before, step % degree == rank
