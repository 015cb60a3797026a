"""Devices for a command: as many CPU devices as its mesh needs, where there is no accelerator."""

import os

import jax
from jax.sharding import Mesh

from shardzoo.zoo.mesh import Degrees, make_mesh

MOST_CPU_DEVICES = 256  # that a command makes by itself: each takes threads
COUNT_FLAG = "xla_force_host_platform_device_count"


def start_mesh(degrees: Degrees) -> Mesh:
    """The mesh of `degrees`; must come before anything else in the process asks JAX for a device.

    On CPU this makes the devices that the mesh needs, unless XLA_FLAGS already says how many there are; accelerators
    are there or they are not.

    Raises:
        InputError: the mesh needs more devices than there are.
    """
    if COUNT_FLAG not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", min(degrees.devices, MOST_CPU_DEVICES))
    return make_mesh(
        data=degrees.data,
        pipe=degrees.pipe,
        context=degrees.context,
        tensor=degrees.tensor,
        kv_heads=degrees.kv_heads,
    )
