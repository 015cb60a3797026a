"""What each process runs in the test of measuring over several processes."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardzoo.zoo import make_mesh
from shardzoo.zoo.measure import measure


def late_device(late, steps):
    """A step in which one device of the mesh computes far longer than the others, and all then add up."""
    mesh = make_mesh(data=jax.device_count())

    def body(x):
        long = lax.axis_index("data") == late
        y = lax.fori_loop(0, jnp.where(long, 60, 2), lambda _, y: jnp.tanh(y @ y), x)
        return lax.psum(y, "data")

    mapped = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=True))
    whole = np.full((256 * jax.device_count(), 256), 1e-3, np.float32)
    x = jax.make_array_from_callback(whole.shape, NamedSharding(mesh, P("data")), lambda index: whole[index])
    found = measure(mapped, x, steps=steps, flops=1e6, peak=1e9)
    return found.to_json() | {"straggler": [found.straggler.process, found.straggler.device]}
