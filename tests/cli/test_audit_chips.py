"""`audit --chips`: what a slice's name means, times by hand, and the ranking of meshes."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import command_line
import pytest
from command_line import environment, invoke
from presets import presets

from shardzoo.cli import chips, prediction
from shardzoo.cli.verdicts import judge
from shardzoo.errors import InputError
from shardzoo.zoo import decoder, find_preset, layout
from shardzoo.zoo.families import TraceSizes, find_family
from shardzoo.zoo.mesh import Degrees

TINY = decoder.Config(vocab=64, embed=32, layers=3, heads=8, kv_heads=4, head_dim=8, mlp=64)


@pytest.mark.parametrize("name, count", [("v5e-8", 8), ("v6e-4", 4), ("v5p-8", 4), ("v4-16", 8), ("v7x-8", 4)])
def test_names_of_slices(name, count):
    where = chips.parse(name)
    assert where.chips == count and where.chip is chips.CHIPS[name.split("-")[0]]


@pytest.mark.parametrize("name", ["v5e", "v5e-0", "8", "v5e-8x", "v5e-\u0668", "v5e-" + 5000 * "9"])
def test_names_that_are_none(name):
    with pytest.raises(InputError, match="version and a count"):
        chips.parse(name)


@pytest.mark.parametrize("name", ["v9-8", "h100-8", "A100-80gb-8"])
def test_chips_that_are_not_known(name):
    with pytest.raises(InputError, match=f"nothing is known of {name[:-2]}: use one of v4, "):
        chips.parse(name)


@pytest.mark.parametrize("name, most", [("v6e-257", 256), ("v5p-12290", 6144), ("v4-999998", 4096)])
def test_more_chips_than_slices_have(name, most):
    with pytest.raises(InputError, match=f"at most {most} chips"):
        chips.parse(name)


def test_a_chip_of_two_devices():
    """A mesh of v7x is of twice as many devices as chips, each with half of what a chip has."""
    where = chips.parse("tpu7x-8")
    assert (where.chips, where.devices, where.topology) == (4, 8, "tpu7x:2x2x1")
    chip, device = where.chip, where.chip.device
    assert (device.flops, device.hbm, device.memory) == (2307e12 / 2, 7380e9 / 2, 96 * 2**30)
    assert (chip.flops, chip.memory, device.device) == (2307e12, 192 * 2**30, device)
    ended = invoke("audit", "decoder/smollm2-360m", "--chips", "v7x-2", "--tokens", 64, "--json")
    assert ended.status == 0, ended.err
    assert [m["mesh"] for m in json.loads(ended.out)["ranking"]["meshes"]] == ["context=2"]


@pytest.mark.parametrize("name, shape", [("v5e-8", "v5e:2x4"), ("v6e-4", "v6e:2x2"), ("v5p-16", "v5p:2x2x2")])
def test_the_shape_that_is_compiled_for(name, shape):
    assert chips.parse(name).topology == shape


def test_a_slice_of_no_usual_shape_is_not_compiled_for():
    with pytest.raises(InputError, match="for 6 chips there is no shape: use 1, 2, 4, 8"):
        _ = chips.parse("v5e-6").topology


def test_half_a_chip():
    with pytest.raises(InputError, match="count cores, 2 to a chip: use v5p-6"):
        chips.parse("v5p-5")


def test_times_are_costs_over_published_speeds():
    declared, where = decoder.declare(TINY), chips.parse("v5e-4")
    verdict = judge(declared, Degrees(context=2, tensor=2))
    got = prediction.predict(find_family("decoder"), declared, verdict, where, TraceSizes(tokens=32))
    assert got.compute == got.costs.passes / 197e12 > 0
    assert got.reading == verdict.device_bytes / 819e9
    assert {link.collective.kind for link in got.links} == {"all-reduce", "all-to-all"}
    for link in got.links:
        assert link.seconds == link.collective.link_bytes / (2 * 50e9)
        assert link.hidden == min(link.seconds, link.collective.beside / 197e12)
    assert got.seconds == max(got.compute, got.reading) + sum(link.seconds for link in got.links)
    assert sum(got.costs.parts.values()) == got.costs.passes


def test_all_meshes_of_the_chips():
    assert {str(d) for d in prediction.meshes_of(4, batch=2)} == {
        "tensor=4", "context=2,tensor=2", "context=4", "data=2,tensor=2", "data=2,context=2",
    }  # fmt: skip
    staged = {str(d) for d in prediction.meshes_of(4, batch=2, pipes=(1, 2, 4))}
    assert {"pipe=2,tensor=2", "pipe=2,context=2", "pipe=4"} <= staged and "data=2,pipe=2" not in staged
    assert not any(d.pipe > 1 for d in prediction.meshes_of(4, batch=1, pipes=(1, 2, 4)))
    assert all(d.data == 1 and d.devices == 6 for d in prediction.meshes_of(6, batch=1))


def test_a_pipeline_of_stages_is_ranked_too():
    declared, where = decoder.declare(dataclasses.replace(TINY, layers=4)), chips.parse("v5e-4")
    found = prediction.rank(find_family("decoder"), declared, where, TraceSizes(batch=4, tokens=32), [Degrees(pipe=4)])
    (one,) = found.predictions
    assert one.ticks == 7 and one.stage == pytest.approx(one.seconds / 7)
    assert any("slowest stage: " in line and "7 ticks a step" in line for line in one.work_lines())
    (sent,) = [link.collective for link in one.links if link.collective.kind == "collective-permute"]
    assert sent.axes == ("pipe",) and sent.count >= 6


def test_the_ranking_puts_what_fits_first_and_names_what_does_not():
    ended = invoke("audit", "decoder/smollm2-135m", "--chips", "v5e-4", "--tokens", 64, "--json")
    assert ended.status == 0
    ranking = json.loads(ended.out)["ranking"]
    assert ranking["count"] == 4 and ranking["dtypes"] == ["bfloat16"]
    assert [m["mesh"] for m in ranking["meshes"]] == ["context=4"]  # 9 heads and 3 of keys, 1536, 49152: none divide
    assert set(ranking["do_not_fit"]) == {"tensor=4", "context=2,tensor=2"}


def test_weights_that_no_mesh_holds():
    ended = invoke("audit", "decoder/qwen3-8b", "--chips", "v5e-1", "--tokens", 64)
    assert ended.status == 0 and "best: one device" in ended.out
    ended = invoke("audit", "wan/wan2.1-t2v-14b", "--chips", "v5e-1", "--frames", 5, "--height", 64, "--width", 64)
    assert ended.status == 1
    assert "no mesh of v5e-1 fits (2 chips for the weights alone)" in ended.out
    assert "v5e-2, 2 chips: tensor=2, " in ended.out and "int8 weights (--quantize int8): one device" in ended.out


def test_no_mesh_that_the_dims_allow():
    ended = invoke("audit", "decoder/smollm2-135m", "--chips", "v5e-4", "--mesh", "tensor=4")
    assert ended.status == 1
    assert "none of these meshes fits the model's dims:\n  not tensor=4" in ended.out and "alone" not in ended.out


def test_attention_without_a_kernel_cannot_be_counted():
    ended = invoke("audit", "decoder/smollm2-135m", "--chips", "v5e-1", "--dtype", "float16")
    assert ended.status == 1 and "unknown length" in ended.err and "bfloat16" in ended.err


@pytest.mark.parametrize(
    "preset", ["flux/flux1-dev", "flux2/flux2-klein-4b", "qwen-image/qwen-image", "wan/wan2.1-t2v-1.3b"]
)
def test_images_smaller_than_a_token(preset):
    ended = invoke("audit", preset, "--chips", "v5e-1", "--height", 15)
    assert ended.status == 1 and "height=15 is below 16" in ended.err


def test_sizes_beyond_all_reason_are_wrong_usage():
    assert invoke("audit", "flux/flux1-dev", "--chips", "v5e-4", "--height", 10**9).status == 2


def test_given_meshes_have_to_be_of_the_chips():
    ended = invoke("audit", "decoder/qwen3-8b", "--chips", "v5e-4", "--mesh", "tensor=8")
    assert ended.status == 1 and "chips='v5e-4' are 4, and mesh (tensor=8) is of another number" in ended.err


def test_neither_meshes_nor_chips():
    ended = invoke("audit", "decoder/qwen3-8b")
    assert ended.status == 2 and "--mesh" in ended.err and "--chips" in ended.err


def test_a_mesh_given_twice_is_told_about_once():
    words = ("--mesh", "tensor=4", "--mesh", "tensor=4", "--chips", "v5e-4", "--tokens", 64, "--json")
    found = json.loads(invoke("audit", "decoder/smollm2-1.7b", *words).out)
    assert len(found["meshes"]) == len(found["ranking"]["meshes"]) == 1


@pytest.mark.parametrize(
    "preset, takes",
    [
        ("decoder/smollm2-135m", "tokens"),
        ("clip-text/clip-l", "tokens"),
        ("clip-vision/vit-h-14", ""),
        ("wan/wan2.1-t2v-1.3b", "frames height width"),
        ("wan-vae/wan2.1-vae", "frames height width"),
        ("image-vae/flux1-vae", "height width"),
        ("qwen-image/qwen-image", "tokens height width"),
    ],
)
def test_sizes_that_a_family_takes(preset, takes):
    family, config = find_preset(preset)
    assert prediction.sizes_of(family, family.declare(config)) == ("batch", *takes.split())


def test_sizes_that_a_model_does_not_have():
    ended = invoke("audit", "decoder/smollm2-135m", "--mesh", "one", "--frames", 5, "--tokens", 64, "--width", 64)
    assert ended.status == 1 and "decoder have no --frames, --width: leave" in ended.err
    assert "they take --batch, --tokens" in ended.err


@pytest.mark.parametrize("preset", presets())
def test_every_preset_can_be_predicted(preset):
    """Each with an attention of its own, whose work has to be known."""
    family, config = find_preset(preset)
    model = layout.astype(family.declare(config), "bfloat16")
    fitting = next(v for n in (8, 4, 2, 1) if (v := judge(model, Degrees(context=8 // n, tensor=n))).fits)
    found = prediction.predict(family, model, fitting, chips.parse("v5e-8"), TraceSizes())
    assert found.seconds > 0 and found.costs.flops > 0


TIMED = """
import sys, time
from command_line import invoke
from shardzoo.zoo import find_preset
find_preset(sys.argv[1])
invoke("audit", "clip-text/clip-l", "--chips", "v5e-8")  # imports what an audit needs
start = time.process_time()
ended = invoke("audit", sys.argv[1], "--chips", "v5e-8")
print(time.process_time() - start)
assert "best: " in ended.out or "what would: " in ended.out, ended
"""


@pytest.mark.slow
@pytest.mark.parametrize("preset", presets())
def test_ranking_all_meshes_takes_two_seconds(preset):
    """The whole command after its imports, without the tests' checks of types; by the processor's clock."""
    words = [sys.executable, "-c", TIMED, preset]
    path = {"PYTHONPATH": str(Path(command_line.__file__).parent)}
    ended = subprocess.run(words, env=environment(**path), capture_output=True, text=True, check=True)
    assert float(ended.stdout) < 2
