"""What `audit --topology` compiles: every family of the zoo gives its forward pass and abstract inputs."""

import jax
import pytest

from shardzoo import zoo
from shardzoo.cli.verdicts import total
from shardzoo.zoo import families, layout
from shardzoo.zoo.families import TraceSizes

SIZES = TraceSizes(batch=2, tokens=8, frames=5, height=32, width=64)


@pytest.mark.parametrize("name", families.MODULES)
def test_a_trace_is_a_function_of_the_model_and_abstract_inputs(name):
    family, mesh = zoo.find_family(name), zoo.make_mesh(devices=jax.devices()[:1])
    assert family.trace is not None
    declared = min(map(family.declare, family.presets.values()), key=lambda one: total(one)[0])
    function, inputs = family.trace(declared, mesh, SIZES)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(inputs))
    out = jax.eval_shape(function, layout.abstract(declared, mesh), *inputs)
    batch = 1 if name in ("qwen2.5-vl-vision", "qwen3-5-vision") else 2  # whose images are one row
    assert jax.tree.leaves(out)
    assert all(leaf.shape[0] == batch for leaf in jax.tree.leaves((inputs, out)) if leaf.ndim) or batch == 1
