"""Runs a layer on a mesh, forward and backward, and holds it against an unsharded float64 definition."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardzoo.zoo import layout

BATCH = PartitionSpec("data")
TOLERANCE = 1e-5  # of the largest element of the reference, for one layer


def harsh(declared, seed=0):
    """Host values with nothing trivial in them: biases off zero, norms off one."""
    rng = np.random.default_rng(seed)
    paths = layout.named(declared)

    def draw(path, p):
        scale = 1.0 / np.sqrt(max(p.shape[-1], 1)) if p.ndim > 1 and "norm" not in path else 0.5
        return (scale * rng.normal(size=p.shape) + (1.0 if "norm" in path else 0.0)).astype(p.dtype)

    return jax.tree.unflatten(jax.tree.structure(declared), [draw(k, p) for k, p in paths.items()])


def put(mesh, value, spec):
    return jax.device_put(value, NamedSharding(mesh, spec))


def on_mesh(declared, mesh, call, in_specs, out_specs):
    """The jitted `call(module, *inputs)` on the mesh, checked for replication."""
    specs = (layout.specs(declared), *in_specs)
    return jax.jit(jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=True))


def run(declared, mesh, call, values, inputs, in_specs, out_specs, cotangent):
    """Output, and gradients of sum(output * cotangent) for module and inputs, as host arrays."""
    live = layout.place(declared, mesh, values)
    placed = [put(mesh, x, s) for x, s in zip(inputs, in_specs, strict=True)]
    f = on_mesh(declared, mesh, call, in_specs, out_specs)

    floats = [i for i, x in enumerate(inputs) if np.issubdtype(np.asarray(x).dtype, np.floating)]

    @jax.jit
    def both(live, placed):
        def call(live, *chosen):
            given = dict(zip(floats, chosen, strict=True))
            return f(live, *[given.get(i, x) for i, x in enumerate(placed)])

        out, pull = jax.vjp(call, live, *[placed[i] for i in floats])
        return out, pull(jnp.asarray(cotangent, out.dtype))

    return jax.tree.map(np.asarray, both(live, placed))


def expected(reference, values, inputs, cotangent):
    """The same from `reference(module, *inputs)` in float64, without a mesh."""

    def wide(x):
        return jnp.asarray(x, jnp.float64) if np.issubdtype(np.asarray(x).dtype, np.floating) else jnp.asarray(x)

    with jax.enable_x64(True):
        args = jax.tree.map(wide, (values, *inputs))
        argnums = tuple(i for i, a in enumerate((None, *inputs)) if i == 0 or np.asarray(a).dtype.kind == "f")
        out = reference(*args)
        grads = jax.grad(lambda *a: jnp.sum(reference(*a) * wide(cotangent)), argnums)(*args)
        return jax.tree.map(np.asarray, (out, grads))


def assert_close(got, want, tolerance=TOLERANCE, label=""):
    """Every leaf within `tolerance` of the largest element of its reference."""
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(want)]
    for name, a, b in zip(names, jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape, f"{label}{name}: shape {a.shape}, reference {b.shape}"
        error = np.abs(a.astype(np.float64) - b).max() / max(np.abs(b).max(), 1e-30)
        assert error <= tolerance, f"{label}{name}: error {error:.2e} of the reference's maximum"


def check(declared, meshes, call, reference, inputs, in_specs, out_specs=BATCH, seed=0):
    """Forward and gradient parity of one layer on each mesh; `declared` may be a function of the mesh."""
    declare = declared if callable(declared) and not hasattr(declared, "__dataclass_fields__") else lambda _: declared
    values = harsh(declare(meshes[0]), seed)
    with jax.enable_x64(True):
        shape = jax.eval_shape(lambda *a: reference(*a), values, *[jnp.asarray(x) for x in inputs]).shape
    cotangent = np.random.default_rng(seed + 1).normal(size=shape).astype(np.float32)
    want = expected(reference, values, inputs, cotangent)
    for mesh in meshes:
        got = run(declare(mesh), mesh, call, values, inputs, in_specs, out_specs, cotangent)
        assert_close(got, want, label=str(dict(mesh.shape)))
