"""Dim by dim: the published rules of each model, what repeats and what it costs, and what stops larger degrees."""

import dataclasses
import json
import os

import hypothesis
import jax
import pytest
from command_line import invoke
from hypothesis import strategies as st

from shardzoo.cli.dimensions import describe, limits, stages
from shardzoo.cli.verdicts import judge
from shardzoo.errors import InputError
from shardzoo.zoo import decoder, find_preset, layout, schedule
from shardzoo.zoo.families import MODULES, TraceSizes, find_family
from shardzoo.zoo.mesh import Degrees, make_mesh


def declared(preset):
    family, config = find_preset(preset)
    return family.declare(config)


def presets_of(family):
    return [f"{family}/{name}" for name in find_family(family).presets]


def described(preset, **degrees):
    model = declared(preset)
    return describe(model, layout.with_kv(model, Degrees(**degrees)), microbatches=8)


def test_qwen3_5_27b_at_tensor_4_is_exact():
    found = described("qwen3-5/qwen3.5-27b", tensor=4)
    assert found.limits.exact == (1, 2, 4) and found.limits.repeating == (8,)
    assert all(d.divides and d.repeats == 1 for d in found.split)
    assert found.repeated.bytes == 0 and found.repeated.work == 0


def test_qwen3_5_27b_at_tensor_8_repeats_each_kv_head_on_two_ranks():
    found = described("qwen3-5/qwen3.5-27b", tensor=8)
    (few,) = [d for d in found.split if d.name == "kv_heads"]
    assert (few.size, few.ways, few.repeats, few.divides) == (4, 4, 2, True)
    assert {(d.name, d.size // d.ways) for d in found.split if d.by_tensor and d.name != "kv_heads"} == {
        ("heads", 3), ("key_heads", 2), ("value_heads", 6), ("mlp", 2176), ("vocab", 31040),
    }  # fmt: skip
    # Keys and values of 16 attention layers, 4 heads of 256 each: a chip has one head more than half of one, float32.
    assert found.repeated.bytes == 16 * 2 * 4 * 256 * 5120 * 4 // 4 // 2
    assert 0.005 < found.repeated.work < 0.007
    assert found.limits.binding == {8: ("kv_heads=4",), 16: ("heads=24",)}


def test_nothing_is_said_to_repeat_where_the_mesh_does_not_divide():
    found = described("qwen3-5/qwen3.5-27b", tensor=1000)
    assert found.repeated is None and found.to_json()["repeated"] is None
    assert not any("repeated KV heads" in line for line in found.lines())


def test_qwen3_5_27b_in_stages():
    """64 layers are 16 super-blocks of three DeltaNet layers and an attention layer."""
    model = declared("qwen3-5/qwen3.5-27b")
    found = {pipe: stages(model, Degrees(pipe=pipe), microbatches=8) for pipe in range(1, 65)}
    assert found[1].stacks == {"delta": 48, "attn": 16}
    assert [pipe for pipe, one in found.items() if one.balanced] == [1, 2, 4, 8, 16]
    for pipe in (2, 4, 8, 16):
        assert found[pipe].bubble == schedule.bubble(pipe, 8) == pytest.approx((pipe - 1) / (8 + pipe - 1))
    assert any("idle 27% of the time" in line for line in found[4].lines())


@pytest.mark.parametrize(
    "preset, exact, stops",
    [
        ("wan/wan2.1-t2v-1.3b", (1, 2, 4), {8: ("heads=12",)}),
        ("wan/wan2.1-t2v-14b", (1, 2, 4, 8), {16: ("heads=40",)}),
        ("wan/wan2.2-ti2v-5b", (1, 2, 4, 8), {16: ("heads=24",)}),
        ("flux/flux1-dev", (1, 2, 3, 4, 6, 8, 12, 24), {48: ("heads=24",)}),
        ("flux2/flux2-dev", (1, 2, 3, 4, 6, 8, 12, 16, 24, 48), {96: ("heads=48",)}),
        ("flux2/flux2-klein-4b", (1, 2, 3, 4, 6, 8, 12, 24), {48: ("heads=24",)}),
        ("decoder/qwen3-8b", (1, 2, 4, 8), {16: ("kv_heads=8",), 32: ("kv_heads=8",), 64: ("heads=32",)}),
    ],
)
def test_tensor_degrees_of_published_models(preset, exact, stops):
    found = limits(declared(preset))
    assert found.exact == exact
    assert found.binding == stops


def test_the_heads_of_wan_1_3b_allow_what_is_published_and_its_mlp_less():
    """12 heads divide by 1, 2, 3, 4, 6 and 12; of these the mlp, 8960 = 2^8 * 5 * 7, by 1, 2 and 4 alone."""
    found = {d.name: set(d.divisors) for d in described("wan/wan2.1-t2v-1.3b").split}
    assert found["heads"] == {1, 2, 3, 4, 6, 12}
    assert found["heads"] & found["mlp"] & found["cond"] == {1, 2, 4}
    for degree in (3, 6, 12):  # which the sequence is split by instead
        assert not judge(declared("wan/wan2.1-t2v-1.3b"), Degrees(tensor=degree)).fits
        assert described("wan/wan2.1-t2v-1.3b", context=degree).sequence.exact
    told = limits(declared("wan/wan2.1-t2v-1.3b"))
    assert told.beside == {degree: ("mlp=8960",) for degree in (3, 6, 12)}
    assert "  the heads divide by tensor=3, 6, 12 too, where mlp=8960 does not" in told.lines()
    (mlp,) = [d for d in described("wan/wan2.1-t2v-1.3b").split if d.name == "mlp"]
    assert mlp.row().endswith("1 2 4 5 7 8 10 14 16 .. 256")
    assert limits(declared("flux/flux1-dev")).beside == {}


@pytest.mark.parametrize("preset", [name for family in MODULES for name in presets_of(family)])
def test_nothing_is_told_to_divide_that_does_not(preset):
    model = declared(preset)
    for degree, dims in limits(model).beside.items():
        problems = " ".join(judge(model, Degrees(tensor=degree)).problems)
        assert all(dim in problems for dim in dims), problems


def test_the_blocks_of_flux2_divide_each_by_itself():
    """Packed in one matrix q, k, v and the two halves of the mlp have 3 x 24 x 128 + 2 x 9216 rows, which 9 divides;
    so does the mlp, but the heads do not."""
    assert (3 * 24 * 128 + 2 * 9216) % 9 == 0
    found = described("flux2/flux2-klein-4b", tensor=9)
    assert {d.name for d in found.split if not d.divides} == {"heads", "cond"}
    verdict = judge(declared("flux2/flux2-klein-4b"), Degrees(tensor=9))
    assert not verdict.fits and any("heads=24" in problem for problem in verdict.problems)


@pytest.mark.parametrize(
    "context, tensor, ways, exact",
    [(2, 4, (2, 1), True), (5, 8, (5, 1), True), (4, 4, (2, 2), False), (16, 1, (8, 2), False), (3, 2, (1, 3), False)],
)
def test_tensor_times_context_against_the_heads(context, tensor, ways, exact):
    found = described("wan/wan2.1-t2v-14b", context=context, tensor=tensor).sequence
    assert (found.ways, found.exact) == (ways, exact) == (found.ways, 40 % (context * tensor) == 0)


def test_keys_are_sent_more_than_once_where_heads_outnumber_them():
    assert described("decoder/qwen3-8b", context=16, tensor=2).sequence.kv_repeated
    assert not described("decoder/qwen3-8b", context=4, tensor=2).sequence.kv_repeated


def test_lines_fit_a_terminal():
    for words in (("--mesh", "tensor=16,context=4"), ("--chips", "v5p-4")):
        ended = invoke("audit", "qwen3-5/qwen3.5-27b", *words, "--tokens", 256)
        assert max(map(len, ended.out.splitlines())) <= 100, ended.out
    assert "kv_heads=4 is what makes tensor=8 repeat heads" in ended.out
    assert "heads=24 is what stops tensor=16" in ended.out


def test_json_has_it_all():
    ended = invoke("audit", "qwen3-5/qwen3.5-27b", "--mesh", "tensor=8", "--tokens", 256, "--json")
    (mesh,) = json.loads(ended.out)["meshes"]
    few = next(d for d in mesh["dimensions"] if d["name"] == "kv_heads")
    assert (few["repeats"], few["divisors"]) == (2, [1, 2, 4])
    assert mesh["tensor_degrees"]["binding"] == {"8": ["kv_heads=4"], "16": ["heads=24"]}
    assert mesh["stages"]["degrees"] == [1, 2, 4, 8, 16]
    assert mesh["memory"]["total"] == sum(mesh["memory"]["bars"].values())


sizes = st.integers(1, 12)


@st.composite
def configs(draw):
    kv_heads = draw(st.integers(1, 6))
    return decoder.Config(
        vocab=draw(st.integers(8, 40)),
        embed=8 * draw(st.integers(1, 4)),
        layers=draw(st.integers(1, 4)),
        heads=kv_heads * draw(st.integers(1, 6)),
        kv_heads=kv_heads,
        head_dim=4,
        mlp=draw(st.integers(1, 40)),
        tied=draw(st.booleans()),
    )


meshes = st.builds(
    Degrees,
    data=st.sampled_from((1, 2)),
    pipe=st.sampled_from((1, 1, 2, 3)),
    context=st.sampled_from((1, 2, 3)),
    tensor=st.sampled_from((1, 2, 3, 4, 6, 8)),
).filter(lambda degrees: degrees.devices <= 8)


@hypothesis.given(configs(), meshes, st.integers(1, 3), st.integers(1, 9))
@hypothesis.settings(max_examples=40)
def test_what_the_audit_says_is_what_jax_does(config, given, batch, tokens):
    """It fits exactly when the mesh is made, the model lies on it and its pass is traced, without our own check."""
    _agree("decoder", config, given, TraceSizes(batch=batch, tokens=tokens))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_what_the_audit_says_is_what_jax_does_of_every_family(name):
    """The same of the family's tiny config, some of its numbers changed by chance."""
    from tiny_families import SIZES, TINY  # imports every family

    config = TINY[name]
    numbers = [field.name for field in dataclasses.fields(config) if type(getattr(config, field.name)) is int]
    changes = st.dictionaries(st.sampled_from(numbers), st.sampled_from((1 / 3, 1 / 2, 3 / 4, 3 / 2, 2, 3)), max_size=3)

    @hypothesis.given(changes, meshes, st.integers(1, 3))
    @hypothesis.settings(
        max_examples=int(os.environ.get("SHARDZOO_AUDIT_EXAMPLES", "15")),
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    def agree(changed, given, batch):
        try:
            other = dataclasses.replace(
                config, **{n: max(1, int(by * getattr(config, n))) for n, by in changed.items()}
            )
        except InputError:
            hypothesis.reject()
        # Of a model without stages the devices of a pipeline would do the same work, which only our own check refuses.
        hypothesis.assume(given.pipe == 1 or stages(find_family(name).declare(other), Degrees()).split)
        _agree(name, other, given, dataclasses.replace(SIZES, batch=batch))

    agree()


def _agree(name, config, given, sizes):
    """The mesh fits exactly if it is made, the model lies on it and its pass is traced, without our own check."""
    family = find_family(name)
    model = family.declare(config)
    verdict = judge(model, given)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "audit", lambda *_: None)
        try:
            _accept(family, model, verdict.degrees, sizes)
            refused = None
        except (InputError, ValueError, TypeError) as error:
            refused = error
    assert verdict.fits == (refused is None), (verdict.problems, refused)


def _accept(family, model, degrees, sizes):
    devices = jax.devices()[: degrees.devices]
    split = {name: getattr(degrees, name) for name in ("data", "pipe", "context", "tensor", "kv_heads")}
    mesh = make_mesh(**split, devices=devices)
    function, arguments = family.trace(model, mesh, sizes)
    jax.eval_shape(function, layout.abstract(model, mesh), *arguments)


def test_the_property_can_fail():
    """Of seven heads half a head does not lie on a device: JAX refuses without our check as well."""
    config = decoder.Config(vocab=8, embed=8, layers=1, heads=7, kv_heads=7, head_dim=4, mlp=8)
    model = decoder.declare(config)
    assert not judge(model, Degrees(tensor=2)).fits
    with pytest.raises((InputError, ValueError)):
        degrees = dataclasses.replace(Degrees(tensor=2), kv_heads=7)
        _accept(find_family("decoder"), model, degrees, TraceSizes(batch=1, tokens=4))
