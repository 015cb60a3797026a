"""Kernels by their outlines: the same memory and costs as of the kernels written out, and nothing else of them."""

import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh

from shardzoo.cli.memory import memory_of, trace
from shardzoo.cli.prediction import abstract_mesh
from shardzoo.kernels.outline import outlined
from shardzoo.zoo import find_preset, layout
from shardzoo.zoo.costs import costs_by
from shardzoo.zoo.families import TraceSizes
from shardzoo.zoo.mesh import Degrees

V5E = "TPU v5 lite"


def written_out(mesh: AbstractMesh) -> AbstractMesh:
    device = mesh.abstract_device
    assert device.device_kind == outlined(V5E)
    whole = type(device)(device_kind=V5E, num_cores=1, platform="tpu")
    return mesh.update(abstract_device=whole)


def kernels(jaxpr) -> list[int]:
    """The number of equations in each kernel of a program."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            found.append(len(eqn.params["jaxpr"].eqns))
        else:
            for inner in jaxprs_in_params(eqn.params):
                found += kernels(inner)
    return found


@pytest.mark.parametrize(
    ("preset", "sizes", "train"),
    [
        ("decoder/qwen3-4b", {"tokens": 3000}, True),
        ("qwen3-5/qwen3.5-27b", {"tokens": 1000, "batch": 2}, True),
        ("wan/wan2.1-i2v-14b", {}, False),
    ],
)
def test_outlines_count_as_kernels_do(preset: str, sizes: dict, train: bool):
    family, config = find_preset(preset)
    model = layout.astype(family.declare(config), "bfloat16")
    degrees = layout.with_kv(model, Degrees(context=2, tensor=2))
    mesh = abstract_mesh(degrees, V5E)
    both = [trace(family, model, m, TraceSizes(**sizes), train=train) for m in (mesh, written_out(mesh))]
    outlines, whole = (kernels(traced.jaxpr) for traced in both)
    assert len(outlines) == len(whole) > 0 and set(outlines) == {0} and min(whole) > 10
    memory = [memory_of(model, degrees, traced, train=train) for traced in both]
    assert memory[0] == memory[1]
    costs = [costs_by(traced.jaxpr, degrees.sizes, *traced.arguments) for traced in both]
    assert costs[0] == costs[1]
