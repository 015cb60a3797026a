"""A vision tower and the language model that reads its features, on a mesh: what they give, and all gradients."""

import jax
import numpy as np

from shardzoo.zoo import layout
from shardzoo.zoo.mesh import make_mesh


def seen_and_read(parts, values, degrees, kv_heads, see, read, pixels, grids, at_rest=None):
    """Features, what is read with them, and the gradients of a number by both parts' weights and by the pixels.

    `see(declared, mesh)` makes the tower's forward pass; `read(declared, mesh)` makes `f(model, features)`, which gives
    the number and the result.
    """
    if at_rest:
        parts = [layout.split_at_rest(x, at_rest, layout.with_kv(x, degrees), smallest=64) for x in parts]
    mesh = make_mesh(data=degrees.data, context=degrees.context, tensor=degrees.tensor, kv_heads=kv_heads)
    eyes, mind = see(parts[0], mesh), read(parts[1], mesh)

    def total(models, pixels):
        features = eyes(models[0], pixels, grids=grids)
        number, result = mind(models[1], features)
        return number, (features, result)

    placed = [layout.place(x, mesh, v) for x, v in zip(parts, values, strict=True)]
    both = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))
    (_, out), (of_models, of_pixels) = both(placed, pixels)
    return jax.tree.map(np.asarray, (*out, *map(layout.named, of_models), of_pixels))
