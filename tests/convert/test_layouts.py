"""Families of several layouts: each is found, read by its own rules, and written from a checkpoint of any other."""

import dataclasses
import json

import numpy as np
import pytest
import safetensors.numpy
import tiny_models
import two_layouts
from command_line import invoke
from two_layouts import Config, packed, tensors_apart, write, write_config

from shardzoo import checkpoints
from shardzoo.convert import families, relayout
from shardzoo.convert.convert import convert, plan_conversion
from shardzoo.convert.export import export
from shardzoo.convert.families import Known
from shardzoo.convert.verify import verify
from shardzoo.errors import InputError

CONFIG = Config()


@pytest.fixture(autouse=True)
def pair(monkeypatch):
    monkeypatch.setitem(families.FAMILIES, "pair", Known("two_layouts", frozenset({"PairModel", "pair"})))


@pytest.fixture
def sources(tmp_path):
    """The same weights in both layouts."""
    tensors = tensors_apart(CONFIG)
    apart = write(tmp_path / "apart", tensors, write_config(CONFIG, "apart"))
    return {
        "apart": apart,
        "packed": write(tmp_path / "packed", packed(tensors, CONFIG), {"model_type": "pair", "depth": 3}),
    }


def load(folder):
    return {k: v for f in folder.glob("*.safetensors") for k, v in safetensors.numpy.load_file(f).items()}


def equal(one, other):
    assert set(one) == set(other)
    for key in one:
        assert one[key].dtype == other[key].dtype
        np.testing.assert_array_equal(one[key], other[key], err_msg=key)


def test_both_layouts_hold_the_same_leaves(sources, tmp_path):
    for name, source in sources.items():
        report = convert(source, tmp_path / f"{name}.ckpt", sync=False)
        assert (report.family, report.layout) == ("pair", name)
        verify(tmp_path / f"{name}.ckpt", source)
    one, other = (checkpoints.open(tmp_path / f"{name}.ckpt") for name in sources)
    for path in one.manifest.leaves:
        np.testing.assert_array_equal(one.read(path), other.read(path), err_msg=path)


@pytest.mark.parametrize(("came", "wanted"), [("apart", "packed"), ("packed", "apart")])
def test_a_checkpoint_is_written_in_the_other_layout_and_comes_back(sources, tmp_path, came, wanted):
    convert(sources[came], tmp_path / "ckpt", sync=False)
    export(tmp_path / "ckpt", tmp_path / "same")
    assert tiny_models.files(tmp_path / "same") == tiny_models.files(sources[came])
    report = export(tmp_path / "ckpt", tmp_path / "other", layout=wanted)
    assert report.layout == wanted and not report.identical
    equal(load(tmp_path / "other"), load(sources[wanted]))
    stem = {"apart": "diffusion_model", "packed": "model"}[wanted]
    assert set(report.changed) == {f"{stem}.safetensors"}
    assert json.loads((tmp_path / "other/config.json").read_text()) == write_config(CONFIG, wanted)
    convert(tmp_path / "other", tmp_path / "again", sync=False)
    export(tmp_path / "again", tmp_path / "back", layout=came)
    equal(load(tmp_path / "back"), load(sources[came]))


def test_large_files_are_cut_and_indexed(sources, tmp_path, monkeypatch):
    monkeypatch.setattr(relayout, "SHARD_BYTES", 8000)
    convert(sources["packed"], tmp_path / "ckpt", sync=False)
    report = export(tmp_path / "ckpt", tmp_path / "out", layout="apart")
    index = json.loads((tmp_path / "out/diffusion_model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2 and set(report.changed) == set(index["weight_map"].values())
    equal(load(tmp_path / "out"), load(sources["apart"]))
    convert(tmp_path / "out", tmp_path / "again", sync=False)


def test_what_a_layout_has_no_place_for_is_refused_by_name(tmp_path):
    config = dataclasses.replace(CONFIG, gate=True)
    write(tmp_path / "source", tensors_apart(config), write_config(config, "apart"))
    convert(tmp_path / "source", tmp_path / "ckpt", sync=False)
    with pytest.raises(InputError, match=r"cannot be written in layout 'packed': blocks.gate: has no place in it"):
        export(tmp_path / "ckpt", tmp_path / "out", layout="packed")
    with pytest.raises(InputError, match=r"layout='original' is not one of family pair .there are 'apart', 'packed'"):
        export(tmp_path / "ckpt", tmp_path / "out", layout="original")
    assert not (tmp_path / "out").exists()


def test_tensors_of_several_leaves_need_one_dtype(sources, tmp_path):
    tensors = load(sources["apart"])
    mixed = {k: v.astype(np.float16) if "to_v" in k or "to_k" in k else v for k, v in tensors.items()}
    convert(write(tmp_path / "mixed", mixed, write_config(CONFIG, "apart")), tmp_path / "ckpt", sync=False)
    with pytest.raises(InputError, match=r"blocks.0.qkv.weight: is made of blocks.kv, blocks.q, which have the dtypes"):
        export(tmp_path / "ckpt", tmp_path / "out", layout="packed")


def test_what_is_only_carried_is_left_out_and_said(tmp_path):
    tensors = packed(tensors_apart(CONFIG), CONFIG) | {"seen": np.arange(3)}
    convert(write(tmp_path / "source", tensors, {"model_type": "pair", "depth": 3}), tmp_path / "ckpt", sync=False)
    ended = invoke("export", tmp_path / "ckpt", tmp_path / "out", "--layout", "apart")
    assert ended.status == 0 and "note: 1 tensors that are stored but not run" in ended.err, ended.err
    equal(load(tmp_path / "out"), tensors_apart(CONFIG))


def test_other_parts_are_renamed_where_layouts_differ_in_prefixes_alone(tmp_path):
    source = tiny_models.save("mistral3", tmp_path / "source")
    convert(source, tmp_path / "ckpt", sync=False)
    came = load_bits(source)
    old = "transformers, multimodal, names before 5.0"
    layout = checkpoints.open(tmp_path / "ckpt").manifest.header.detail["layout"]
    wanted = "transformers, multimodal" if layout == old else old
    report = export(tmp_path / "ckpt", tmp_path / "out", layout=wanted)
    assert not report.notes
    convert(tmp_path / "out", tmp_path / "again", sync=False)
    assert checkpoints.open(tmp_path / "again").manifest.header.detail["layout"] == wanted
    export(tmp_path / "again", tmp_path / "back", layout=layout)
    assert load_bits(tmp_path / "back") == came and set(load_bits(tmp_path / "out")) != set(came)


def load_bits(folder):
    import safetensors.torch

    found = {}
    for file in folder.glob("*.safetensors"):
        found |= {key: tiny_models.bits(value).tobytes() for key, value in safetensors.torch.load_file(file).items()}
    return found


def test_a_model_saved_from_a_run_is_written_in_a_layout_that_is_named(sources, tmp_path):
    import jax

    from shardzoo.zoo.mesh import make_mesh

    convert(sources["apart"], tmp_path / "ckpt", sync=False)
    model = checkpoints.restore(tmp_path / "ckpt", make_mesh(devices=jax.devices()[:1]))
    checkpoints.save(tmp_path / "saved", model, two_layouts.Pair.declare(CONFIG))
    with pytest.raises(InputError, match=r"saved from a running model(.|\n)*there are 'apart', 'packed'"):
        export(tmp_path / "saved", tmp_path / "out")
    export(tmp_path / "saved", tmp_path / "out", layout="packed")
    equal(load(tmp_path / "out"), load(sources["packed"]))


@pytest.mark.parametrize("name", ["apart", "packed"])
def test_without_a_config_the_tensors_tell(sources, tmp_path, name):
    (sources[name] / "config.json").unlink()
    plan = plan_conversion(sources[name])
    assert (plan.family, plan.layout, plan.config) == ("pair", name, CONFIG)
    wrapped = {f"model.diffusion_model.{key}": value for key, value in load(sources[name]).items()}
    plan = plan_conversion(write(tmp_path / "wrapped", wrapped, None))
    assert (plan.layout, plan.prefix, plan.config) == (name, "model.diffusion_model.", CONFIG)


def test_tensors_that_two_families_know_are_refused_until_one_is_named(sources, monkeypatch):
    (sources["packed"] / "config.json").unlink()
    twin = dataclasses.replace(two_layouts.FAMILY, family="twin")
    rules = {"pair": two_layouts.FAMILY, "twin": twin}
    monkeypatch.setitem(families.FAMILIES, "twin", Known("two_layouts", frozenset()))
    monkeypatch.setattr(families, "rules_of", lambda name, known=families.rules_of: rules.get(name) or known(name))
    with pytest.raises(InputError, match=r"may be of family pair \(layout 'packed', knows 13 of them\) or twin"):
        plan_conversion(sources["packed"])
    assert plan_conversion(sources["packed"], family="pair").family == "pair"


def test_a_config_of_another_model_beside_the_weights_is_set_aside(sources, tmp_path):
    (sources["packed"] / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 7}))
    plan = plan_conversion(sources["packed"])
    assert plan.family == "pair" and any("config.json beside the weights is of" in note for note in plan.notes)
    convert(sources["packed"], tmp_path / "ckpt", sync=False)
    assert "config.json" not in checkpoints.open(tmp_path / "ckpt").assets
    with pytest.raises(InputError, match="model_type='llama' as given"):
        plan_conversion(sources["packed"], config=sources["packed"] / "config.json")


@pytest.mark.parametrize("config", [{"_class_name": "PairModel", "model_type": "llama"}, {"architectures": ["pair"]}])
def test_the_class_of_a_config_tells_before_its_model_type(sources, config):
    (sources["apart"] / "config.json").write_text(json.dumps(config | {"num_layers": 3}))
    assert plan_conversion(sources["apart"]).family == "pair"


def test_sizes_of_one_are_named_in_messages(sources):
    tensors = load(sources["apart"])
    tensors["layers.1.table"] = tensors["layers.1.table"][0]
    safetensors.numpy.save_file(tensors, sources["apart"] / "model.safetensors")
    with pytest.raises(
        InputError, match=r"layers.1.table: shape \(2, 24\), expected \(1, 2, 24\) = \(1, part=2, embed=24"
    ):
        plan_conversion(sources["apart"])
