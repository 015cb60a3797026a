"""A tiny FLUX.1 whose sizes divide by few degrees, its inputs, and the collectives of its forward pass."""

import hlo
import jax
import numpy as np

from shardzoo.zoo import flux, layout
from shardzoo.zoo.mesh import make_mesh

CONFIG = flux.Config(
    in_channels=6, out_channels=5, heads=8, head_dim=12, double_layers=2, single_layers=2, mlp=48, text=10, pooled=7,
    axes=(2, 4, 6),
)  # fmt: skip
BATCH, GRID, TEXT = 3, (3, 5), 7
_rng = np.random.default_rng(0)
GIVEN = [
    _rng.normal(size=s).astype(np.float32) for s in ((BATCH, 15, CONFIG.in_channels), (BATCH, TEXT, 10), (BATCH, 7))
]
TIMES = _rng.uniform(0, 1, BATCH).astype(np.float32)
GUIDANCE = _rng.uniform(1, 5, BATCH).astype(np.float32)
COTANGENT = _rng.normal(size=(BATCH, 15, CONFIG.out_channels)).astype(np.float32)
IDS = flux.image_ids(*GRID)


def call(f, model, given=GIVEN):
    return f(model, *given, TIMES, image_ids=IDS, guidance=GUIDANCE)


def result(declared, mesh, model, **options):
    """The forward pass, on the host."""
    f = flux.forward(declared, mesh, **options)
    return np.asarray(jax.jit(lambda m: call(f, m))(model))


def collectives(declared, degrees, **options):
    """Collectives among several devices in the compiled forward pass; those in the body of a scan count once."""
    mesh = make_mesh(**degrees)
    f = flux.forward(declared, mesh, **options)
    lowered = jax.jit(lambda m, *x: call(f, m, x)).lower(layout.abstract(declared, mesh), *GIVEN)
    return hlo.collectives(lowered.compile())
