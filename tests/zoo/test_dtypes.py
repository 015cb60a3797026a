"""dtype= of declarations and of every family's forward: by the names that users write, others refused by name."""

import importlib
import inspect

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_families import TINY

from shardzoo import zoo
from shardzoo.errors import InputError
from shardzoo.zoo import generate
from shardzoo.zoo.families import MODULES

OPTIONS = ("forward", "loss_and_grad", "context", "encode", "decode", "encode_stream", "decode_stream")
FUNCTIONS = [
    (family, name)
    for family, module in MODULES.items()
    for name in OPTIONS
    if "dtype" in inspect.signature(getattr(zoo, module).__dict__.get(name, lambda: None)).parameters
]


def test_every_family_has_such_a_function():
    assert {family for family, _ in FUNCTIONS} == set(MODULES)


@pytest.mark.parametrize(("family", "name"), FUNCTIONS)
def test_forward(family, name):
    module = importlib.import_module(f"shardzoo.zoo.{MODULES[family]}")
    declared, mesh = module.declare(TINY[family]), zoo.make_mesh(tensor=2)
    make = getattr(module, name)
    for short in ("bf16", "float32", jnp.bfloat16, np.dtype("float16")):
        make(declared, mesh, dtype=short)
    for wrong in ("int8", "bf15", np.int32, bool, "fp"):
        with pytest.raises(InputError, match=rf"{MODULES[family]}\.\w+: dtype=.*use float32, bfloat16"):
            make(declared, mesh, dtype=wrong)


@pytest.mark.parametrize("family", MODULES)
def test_declaration(family):
    module = importlib.import_module(f"shardzoo.zoo.{MODULES[family]}")
    found = {str(p.dtype) for p in zoo.layout.named(module.declare(TINY[family], "bf16")).values()}
    assert "bfloat16" in found
    assert zoo.layout.named(module.declare(TINY[family], None)) == zoo.layout.named(module.declare(TINY[family]))
    with pytest.raises(InputError, match="declare: dtype='int8'"):
        module.declare(TINY[family], "int8")


def test_generation():
    declared, mesh = zoo.decoder.declare(TINY["decoder"]), zoo.make_mesh(tensor=2)
    for make in (generate.generate, generate.stream):
        with pytest.raises(InputError, match="generate: dtype='int8'"):
            make(declared, mesh, dtype="int8")
