"""Compiling ahead of time for TPUs that are not there."""

import dataclasses
import json
import math

import pytest
from command_line import invoke, run

from shardzoo import zoo
from shardzoo.zoo import layout

TINY = zoo.decoder.Config(vocab=512, embed=256, layers=2, heads=8, kv_heads=2, head_dim=64, mlp=512)


@pytest.fixture(scope="module", autouse=True)
def tiny_preset():
    """A preset that compiles quickly, under a family of its own so that the zoo's list stays as it is."""
    from shardzoo.zoo.families import FAMILIES, find_family

    FAMILIES["tiny"] = dataclasses.replace(find_family("decoder"), name="tiny", presets={"x": TINY})
    yield
    del FAMILIES["tiny"]


def test_figures_of_each_mesh():
    meshes = ("--mesh", "context=2,tensor=4", "--mesh", "data=8")
    ended = invoke("audit", "tiny/x", *meshes, "--topology", "v5e:2x4", "--tokens", 128, "--batch", 8, "--json")
    assert ended.status == 0, ended.err
    split, data = (mesh["compiled"] for mesh in json.loads(ended.out)["meshes"])
    declared = layout.astype(zoo.decoder.declare(TINY), "bfloat16")
    whole = sum(param.nbytes for param in layout.named(declared).values())
    tokens = 8 * 128 * 4
    assert data["argument_bytes"] == pytest.approx(whole + tokens // 8, rel=0.02)
    assert split["argument_bytes"] < 0.4 * data["argument_bytes"]
    # Logits: batch, sequence and vocabulary are split over all eight devices.
    assert split["output_bytes"] == data["output_bytes"] == math.prod((8, 128, 512)) * 2 // 8
    assert data["collectives"] == {}
    assert split["collectives"]["all-reduce"] >= 2 and split["device"] == "TPU v5 lite"


def test_lines_for_people():
    ended = invoke("audit", "tiny/x", "--mesh", "tensor=4", "--topology", "v5e:2x2", "--tokens", 128)
    assert ended.status == 0, ended.err
    assert "on each TPU v5 lite: arguments " in ended.out and "collectives in the program: " in ended.out


@pytest.mark.parametrize("slice", ["v5e-1", "v6e-2", "v5p-2", "v4-8", "v7x-2", "v5p-16"])
def test_slices_have_the_devices_that_the_audit_counts(slice):
    """Parts of a host too; those of v4 are pairs of cores, as programs on them see it."""
    from shardzoo.cli import chips, topology

    where = chips.parse(slice)
    devices = topology.topology_devices(where.topology)
    assert len(devices) == where.devices and {d.device_kind for d in devices} == {where.chip.kind}


def test_little_effort_of_the_compiler_is_told():
    words = ("audit", "tiny/x", "--mesh", "tensor=4", "--topology", "v5e:2x2", "--tokens", 128, "--json")
    full, quick = (json.loads(invoke(*words, *more).out)["meshes"][0]["compiled"] for more in ((), ("--quick",)))
    assert (full["effort"], quick["effort"]) == ("full", "quick")
    assert full["argument_bytes"] == quick["argument_bytes"] and full["output_bytes"] == quick["output_bytes"]
    assert full["temporary_bytes"] != quick["temporary_bytes"], "it makes no difference"
    for option in ("--quick", "--full"):
        ended = invoke("audit", "tiny/x", "--mesh", "tensor=4", option)
        assert ended.status == 2 and option in ended.err


def test_of_many_convolutions_little_effort_is_chosen_and_told(monkeypatch):
    from shardzoo.cli import topology

    words = ("audit", "tiny/x", "--mesh", "tensor=4", "--topology", "v5e:2x2", "--tokens", 128)
    monkeypatch.setattr(topology, "MANY_CONVOLUTIONS", -1)
    chosen, full = (" ".join(invoke(*words, *more).out.split()) for more in ((), ("--full",)))
    assert "quick effort" in chosen and "--full compiles at full effort: with 0 convolutions" in chosen
    assert "full effort" in full and "--full" not in full


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--mesh", "tensor=4", "--topology", "v5e:2x4"), ("has 8 devices", "mesh (tensor=4) has 4")),
        (("--mesh", "tensor=4", "--topology", "v9:2x2"), ("topology='v9:2x2'", "v5e:2x4")),
        (("--mesh", "tensor=4", "--topology", "four"), ("topology='four'",)),
    ],
)
def test_topologies_that_cannot_be(words, named):
    ended = invoke("audit", "tiny/x", *words)
    assert ended.status == 1 and ended.out == ""
    for part in named:
        assert part in ended.err


def test_a_mesh_that_does_not_fit_is_not_compiled():
    ended = invoke("audit", "tiny/x", "--mesh", "tensor=16", "--topology", "v5e:4x4", "--json")
    (mesh,) = json.loads(ended.out)["meshes"]
    assert ended.status == 1 and mesh["compiled"] is None and mesh["problems"]


def test_a_user_s_process_sees_nothing_of_the_library():
    words = ("--mesh", "context=4", "--topology", "v5e:2x2", "--tokens", 64)
    ended = run("audit", "decoder/smollm2-135m", *words)
    assert ended.status == 0 and ended.err == "", ended.err


def test_a_family_without_a_forward_pass_is_refused_by_name(monkeypatch):
    from shardzoo.zoo.families import FAMILIES

    monkeypatch.setitem(FAMILIES, "tiny", dataclasses.replace(FAMILIES["tiny"], trace=None))
    ended = invoke("audit", "tiny/x", "--mesh", "tensor=4", "--topology", "v5e:2x2")
    assert ended.status == 1 and "family='tiny' cannot be compiled ahead of time: " in ended.err
    assert "decoder" in ended.err and "tiny," not in ended.err


def test_without_libtpu_it_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ended = invoke("audit", "tiny/x", "--mesh", "tensor=4", "--topology", "v5e:2x2")
    assert ended.status == 1 and "pip install libtpu" in ended.err


@pytest.mark.slow
def test_the_compiler_refuses_by_its_peak():
    """What our arithmetic is held against (`Compiled.off`): more than a chip has may be set aside."""
    words = ("audit", "wan-vae/wan2.1-vae", "--chips", "v5e-1", "--mesh", "one", "--compile", "--frames", 81, "--json")
    audit = json.loads(invoke(*words, "--height", 1152, "--width", 1152).out)
    room, compiled = audit["ranking"]["meshes"][0]["room"], audit["meshes"][0]["compiled"]
    assert compiled["peak_bytes"] < room < 0.9 * compiled["total_bytes"]
    assert audit["ranking"]["meshes"][0]["memory"]["program"] == pytest.approx(compiled["peak_bytes"], rel=0.05)
    ended = invoke(*words, "--height", 1280, "--width", 1280)
    assert ended.status == 1 and "does not fit the devices' memory" in ended.err
