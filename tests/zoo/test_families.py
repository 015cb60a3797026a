"""Families by name, and configs to JSON and back."""

import dataclasses
import json
import subprocess
import sys
from typing import Literal

import jax
import pytest
from tiny_families import SIZES, TINY

from shardzoo import zoo
from shardzoo.errors import InputError
from shardzoo.zoo import families, layout, make_mesh
from shardzoo.zoo.families import Family, config_from_json, config_to_json, find_family, find_preset, register


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    theta: float
    kind: Literal["none", "x"] = "none"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    layers: int
    inner: Inner
    pattern: tuple[bool, ...] | None = None
    other: Inner | None = None


CONFIG = Config(layers=3, inner=Inner(theta=1e6), pattern=(True, False), other=Inner(theta=2.0, kind="x"))


def test_config_goes_to_json_and_back():
    for config in (CONFIG, Config(layers=1, inner=Inner(theta=1.0))):
        assert config_from_json(Config, json.loads(json.dumps(config_to_json(config)))) == config


def test_fields_of_another_version_are_refused():
    with pytest.raises(InputError, match=r"unknown fields \['width'\], missing fields \['layers'\]"):
        config_from_json(Config, {"inner": {"theta": 1.0}, "width": 3})
    with pytest.raises(InputError, match=r"Inner: unknown fields \['beta'\]"):
        config_from_json(Config, {"layers": 1, "inner": {"theta": 1.0, "beta": 2}})


def test_names(monkeypatch):
    monkeypatch.setattr(families, "FAMILIES", {})
    monkeypatch.setattr(families, "MODULES", {})
    family = register(Family("tiny", Config, lambda config: None, {"one": CONFIG}))
    assert register(family) is find_family("tiny") and find_preset("tiny/one") == (family, CONFIG)
    with pytest.raises(ValueError, match="there is a family 'tiny' already"):
        register(Family("tiny", Inner, lambda config: None))
    with pytest.raises(InputError, match=r"family='tinny' is not in this zoo: did you mean 'tiny'\? There are tiny"):
        find_preset("tinny/one")
    with pytest.raises(InputError, match=r"preset='tiny/two' is not in this zoo: There are one"):
        find_preset("tiny/two")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("layers", "3", "layers='3' is not int"),
        ("layers", True, "layers=True is not int"),
        ("layers", 2.0, "layers=2.0 is not int"),
        ("layers", None, "layers=None is not int"),
        ("inner", 7, "inner=7 is not Inner"),
        ("inner", None, "inner=None is not Inner"),
        ("inner", [1, 2], "inner="),
        ("inner", {"theta": "1e4"}, "theta='1e4' is not float"),
        ("inner", {"theta": 1.0, "kind": "third"}, "kind='third' is not"),
        ("other", "x", "other='x' is not"),
        ("pattern", [True, 1], "pattern="),
        ("pattern", {"0": True}, "pattern="),
        ("pattern", "ab", "pattern='ab'"),
    ],
)
def test_values_of_other_types_are_refused_by_name(name, value, words):
    whole = config_to_json(CONFIG)
    assert config_from_json(Config, {**whole, "inner": {"theta": 1}}).inner.theta == 1
    with pytest.raises(InputError, match=words):
        config_from_json(Config, {**whole, name: value})


def test_a_program_imports_the_families_it_asks_for():
    program = """
import sys
from shardzoo import zoo
from shardzoo.convert import convert, finding
from shardzoo.convert.families import FAMILIES
loaded = lambda: {name for name in zoo.families.MODULES.values() if f"shardzoo.zoo.{name}" in sys.modules}
assert not loaded(), loaded()
assert zoo.find_family("decoder").name == "decoder" and loaded() == {"decoder"}, loaded()
assert finding._of_kind({"model_type": "llama"}).family == "decoder" and loaded() == {"decoder"}, loaded()
assert zoo.t5.PRESETS and loaded() == {"decoder", "t5"}
assert set(FAMILIES) == set(zoo.family_names())
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_family_is_a_name_of_the_zoo():
    assert set(families.MODULES.values()) <= set(zoo.__all__)


@pytest.mark.parametrize("name", sorted(families.MODULES))
def test_batches_of_nothing_are_refused_by_all(name):
    family, mesh = find_family(name), make_mesh()
    declared = family.declare(TINY[name])
    f, inputs = family.trace(declared, mesh, SIZES)
    nothing = [jax.ShapeDtypeStruct((0, *x.shape[1:]), x.dtype) for x in inputs]
    with pytest.raises(InputError, match=r"holds nothing|at least one|seq=0: give those of all images"):
        jax.eval_shape(f, layout.abstract(declared, mesh), *nothing)
