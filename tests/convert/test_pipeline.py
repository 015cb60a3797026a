"""Pipelines: every component of a diffusers folder, or of the Wan repositories', converted, compared, written back."""

import json
import shutil
import time

import diffusers
import jax
import pytest
import safetensors.torch
import tiny_models
import tiny_wan
import torch
from command_line import invoke, start

from shardzoo import checkpoints
from shardzoo.checkpoints.pipeline import PARTIAL, is_pipeline, open_pipeline
from shardzoo.convert import convert as conversion
from shardzoo.convert import export as exporting
from shardzoo.convert import pipeline as pipelines
from shardzoo.convert.convert import convert
from shardzoo.convert.export import export
from shardzoo.convert.pipeline_source import find_pipeline
from shardzoo.errors import InputError
from shardzoo.zoo.mesh import make_mesh


def kinds(quick, *, clip=True):
    """Every kind, of which only one is quick; with or without those that have an image encoder."""
    whole = [kind for kind in tiny_wan.KINDS if kind != "small" and (clip or not tiny_wan.KINDS[kind][2])]
    return [kind if kind == quick else pytest.param(kind, marks=pytest.mark.slow) for kind in whole]


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Kind -> diffusers folder, made when first asked for."""
    made = {}

    def of(kind):
        if kind not in made:
            made[kind] = tiny_wan.save(kind, tmp_path_factory.mktemp("saved") / kind)
        return made[kind]

    return of


@pytest.fixture(scope="session")
def original(saved, tmp_path_factory):
    """Kind -> the same weights in the folder of the Wan repositories."""
    made = {}

    def of(kind):
        if kind not in made:
            work = tmp_path_factory.mktemp("original")
            source = find_pipeline(saved(kind))
            for name in source.components:
                convert(source.path(name), work / "ckpt" / name, sync=False)
                export(work / "ckpt" / name, work / "out" / name, layout="original")
            parts = {name: work / "out" / name for name in source.components}
            made[kind] = tiny_wan.save_original(saved(kind), parts, work / kind)
        return made[kind]

    return of


def run(source, dst, **options):
    return pipelines.convert(find_pipeline(source), dst, sync=False, **options)


def loaded(folder):
    return {k: tiny_models.bits(v).tobytes() for f in folder.glob("*.safetensors")
            for k, v in safetensors.torch.load_file(f).items()}  # fmt: skip


@pytest.mark.parametrize("kind", kinds("t2v-a14b"))
def test_a_diffusers_folder_comes_back_byte_for_byte(saved, tmp_path, kind):
    report = run(saved(kind), tmp_path / "dst")
    pipeline = open_pipeline(tmp_path / "dst")
    experts = ["transformer", "transformer_2"][: tiny_wan.KINDS[kind][3]]
    image = ["image_encoder"] if tiny_wan.KINDS[kind][2] else []
    assert sorted(pipeline.components) == sorted(["text_encoder", *image, *experts, "vae"]) == sorted(report.components)
    assert pipeline.settings["scheduler"]["flow_shift"] == 3.0
    assert pipeline.settings["boundary_ratio"] == tiny_wan.KINDS[kind][-1].get("boundary_ratio")
    pipelines.verify(pipeline, find_pipeline(saved(kind)))
    pipelines.verify(pipeline)
    pipelines.export(pipeline, tmp_path / "out")
    assert tiny_models.files(tmp_path / "out") == tiny_models.files(saved(kind))
    json.dumps(report.to_json())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dst", "out"]


# The original's image encoder has no config, and no sizes but the published ones can be told from its tensors.
@pytest.mark.parametrize("kind", kinds("ti2v", clip=False))
def test_the_wan_repositories_folder_holds_the_same_and_comes_out_as_diffusers(saved, original, tmp_path, kind):
    source = find_pipeline(original(kind))
    assert source.layout == "original"
    run(original(kind), tmp_path / "dst")
    run(saved(kind), tmp_path / "other")
    pipeline, other = open_pipeline(tmp_path / "dst"), open_pipeline(tmp_path / "other")
    for name in pipeline.components:
        one, two = pipeline.checkpoint(name), other.checkpoint(name)
        assert set(one.manifest.leaves) == set(two.manifest.leaves)
        sums = [{path: leaf.checksum for path, leaf in c.manifest.leaves.items()} for c in (one, two)]
        assert sums[0] == sums[1], name
    assert pipeline.settings["expand_timesteps"] == other.settings["expand_timesteps"] == (kind == "ti2v")
    assert pipeline.settings["boundary_ratio"] == other.settings["boundary_ratio"]
    pipelines.export(pipeline, tmp_path / "out", layout="diffusers")
    for name in pipeline.components:
        assert loaded(tmp_path / "out" / name) == loaded(saved(kind) / name), name
    again = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "out")
    assert type(again).__name__ == pipeline.settings["_class_name"] == other.settings["_class_name"]
    assert again.tokenizer("a red fox").input_ids == [3, 4, 5, 1]
    pipelines.export(pipeline, tmp_path / "same")
    assert find_pipeline(tmp_path / "same").components.keys() == source.components.keys()


def test_an_interrupted_run_never_looks_whole_and_carries_on(saved, tmp_path, monkeypatch):
    source, dst, real, calls = saved("small"), tmp_path / "dst", conversion.convert, []

    def stop(src, to, **options):
        calls.append(to.name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(src, to, **options)

    monkeypatch.setattr(conversion, "convert", stop)
    with pytest.raises(KeyboardInterrupt):
        run(source, dst)
    assert not is_pipeline(dst)
    for words in (("inspect", dst), ("verify", dst), ("export", dst, tmp_path / "x"), ("audit", dst, "--mesh", "one")):
        ended = invoke(*words)
        assert ended.status == 1 and "is an unfinished pipeline: run the command" in ended.err
    first = tiny_models.files(dst / calls[0])
    with pytest.raises(InputError, match=rf"--no-resume(.|\n)*{calls[0]}: was left by a run of another source"):
        run(source, dst, dtype="bfloat16")
    report = run(source, dst)
    assert calls[2:] == [name for name in open_pipeline(dst).components if name != calls[0]]
    assert report.notes == (f"{calls[0]}: was there from an interrupted run",)
    assert tiny_models.files(dst / calls[0]) == first and not (dst / PARTIAL).exists()
    pipelines.verify(open_pipeline(dst), find_pipeline(source))


@pytest.mark.slow
@pytest.mark.parametrize("wanted", ["text_encoder", "transformer", "transformer_2"])
def test_a_killed_run_leaves_nothing_whole_and_carries_on(saved, tmp_path, wanted):
    """Killed once a component is published, wherever the next one is then."""
    source, dst = saved("t2v-a14b"), tmp_path / "dst"
    process = start("convert", source, dst)
    deadline = time.monotonic() + 120
    while not (dst / wanted).exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.kill()
    process.communicate()
    assert not is_pipeline(dst) and (dst / wanted).exists()
    again = run(source, dst)
    assert f"{wanted}: was there from an interrupted run" in again.notes
    pipelines.verify(open_pipeline(dst), find_pipeline(source))
    assert not list(dst.glob("*.orbax-checkpoint-tmp")) and not (dst / PARTIAL).exists()


def test_components_are_picked_and_added(saved, tmp_path):
    source, dst = saved("small"), tmp_path / "dst"
    run(source, dst, components=("vae",))
    assert list(open_pipeline(dst).components) == ["vae"]
    run(source, dst, components=("transformer", "text_encoder"), dtype="bfloat16")
    pipeline = open_pipeline(dst)
    assert set(pipeline.components) == {"vae", "transformer", "text_encoder"}
    dtypes = {
        n: {leaf.spec.dtype.name for leaf in pipeline.checkpoint(n).manifest.leaves.values()}
        for n in pipeline.components
    }
    assert dtypes == {"vae": {"float32"}, "transformer": {"bfloat16"}, "text_encoder": {"bfloat16"}}
    with pytest.raises(InputError, match="exists already, with vae"):
        run(source, dst, components=("vae",))
    with pytest.raises(InputError, match="holds text_encoder, transformer besides vae, which --overwrite would remove"):
        run(source, dst, components=("vae",), overwrite=True)
    convert(source / "vae", dst / "vae", overwrite=True, sync=False, dtype="bfloat16")
    assert len(open_pipeline(dst).components) == 3
    assert {one.spec.dtype.name for one in pipeline.checkpoint("vae").manifest.leaves.values()} == {"bfloat16"}
    (dst / "mine").mkdir()
    with pytest.raises(InputError, match="holds mine besides"):
        run(source, dst, overwrite=True)
    (dst / "mine").rmdir()
    run(source, dst, overwrite=True)
    assert set(open_pipeline(dst).components) == {"vae", "transformer", "text_encoder"}
    other = shutil.copytree(source, tmp_path / "other")
    settings = other / "scheduler/scheduler_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"flow_shift": 7.0}))
    with pytest.raises(InputError, match="is of a pipeline with other settings than"):
        run(other, dst, components=("transformer",))
    for file in (other / "vae").glob("*.safetensors"):
        file.unlink()
    with pytest.raises(InputError, match="vae: there are no weights in its folder"):
        run(other, tmp_path / "third")
    with pytest.raises(InputError, match="component='unet' is not in this diffusers folder"):
        run(source, dst, components=("unet",))


def test_every_problem_is_named_before_anything_is_written(saved, tmp_path):
    source = shutil.copytree(saved("small"), tmp_path / "source")
    tiny_models.edit_config(source / "transformer", qk_norm="rms_norm")
    (source / "vae/diffusion_pytorch_model.safetensors").write_bytes(b"short")
    with pytest.raises(InputError) as error:
        run(source, tmp_path / "dst")
    assert "transformer: " in str(error.value) and "qk_norm='rms_norm'" in str(error.value)
    assert "vae: " in str(error.value) and not (tmp_path / "dst").exists()
    shutil.rmtree(source / "tokenizer")
    with pytest.raises(InputError, match=r"tokenizer: model_index\.json names it"):
        find_pipeline(source)
    index = json.loads((source / "model_index.json").read_text())
    (source / "model_index.json").write_text(json.dumps(index | {"_class_name": "WanVACEPipeline"}))
    with pytest.raises(InputError, match=r"'WanVACEPipeline'.*WanPipeline"):
        find_pipeline(source)


def test_components_that_do_not_fit_together_are_refused_at_once(saved, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=900_000)  # enough for each, not for all
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    for dry_run in (True, False):
        with pytest.raises(InputError, match=r"bytes for all components, 900,000 are free"):
            run(saved("small"), tmp_path / "dst", dry_run=dry_run)
    assert not (tmp_path / "dst").exists()


def test_damage_is_found_in_any_component_and_file(saved, tmp_path):
    run(saved("small"), tmp_path / "dst")
    tiny_models.flip_bit(tmp_path / "dst/vae", _largest(tmp_path / "dst/vae"))
    (tmp_path / "dst/files/tokenizer/tokenizer.json").write_text("{}")
    with pytest.raises(InputError) as error:
        pipelines.verify(open_pipeline(tmp_path / "dst"))
    assert "vae: " in str(error.value) and "files/tokenizer/tokenizer.json" in str(error.value)
    assert "text_encoder" not in str(error.value)


def _largest(checkpoint):
    leaves = checkpoints.open(checkpoint).manifest.leaves
    return max(leaves, key=lambda path: leaves[path].spec.nbytes)


def test_an_interrupted_export_carries_on(saved, tmp_path, monkeypatch):
    run(saved("small"), tmp_path / "dst")
    pipeline, real, calls = open_pipeline(tmp_path / "dst"), exporting.export, []

    def stop(ckpt, to, **options):
        calls.append(to.name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(ckpt, to, **options)

    monkeypatch.setattr(exporting, "export", stop)
    with pytest.raises(KeyboardInterrupt):
        pipelines.export(pipeline, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    report = pipelines.export(pipeline, tmp_path / "out")
    assert calls[0] not in calls[2:] and report.notes == (f"{calls[0]}: was there from an interrupted run",)
    assert tiny_models.files(tmp_path / "out") == tiny_models.files(saved("small"))
    with pytest.raises(InputError, match="exists already"):
        pipelines.export(pipeline, tmp_path / "out")
    pipelines.export(pipeline, tmp_path / "out", overwrite=True)
    with pytest.raises(InputError, match="layout='original' is not one that this pipeline is written in"):
        pipelines.export(pipeline, tmp_path / "x", layout="original")


def test_the_commands_take_pipelines(saved, tmp_path):
    source, dst = saved("small"), tmp_path / "dst"
    ended = invoke("convert", source, dst, "--dry-run")
    assert ended.status == 0 and "text_encoder: " in ended.out and not dst.exists(), ended.err
    ended = invoke("convert", source, dst, "--json")
    assert ended.status == 0 and set(json.loads(ended.out)["components"]) == set(open_pipeline(dst).components)
    assert invoke("verify", dst, source).status == 0
    ended = invoke("inspect", dst, "--component", "transformer", "--json")
    assert list(json.loads(ended.out)["components"]) == ["transformer"]
    assert "pipeline wan of " in invoke("inspect", dst).out
    for target in (source, dst):
        ended = invoke("audit", target, "--mesh", "tensor=2", "--json")
        assert ended.status == 0 and len(json.loads(ended.out)["components"]) == 3, ended.err
    ended = invoke("audit", dst, "--mesh", "tensor=8", "--component", "transformer")
    assert ended.status == 1 and "heads=4 does not divide by 8" in " ".join(ended.out.split())  # lines are folded
    ended = invoke("export", dst, tmp_path / "out", "--component", "vae")
    assert ended.status == 0 and loaded(tmp_path / "out/vae") == loaded(source / "vae")


def test_a_component_that_was_trained_goes_back_with_the_others(saved, tmp_path):
    run(saved("small"), tmp_path / "dst")
    pipeline, mesh = open_pipeline(tmp_path / "dst"), make_mesh(devices=jax.devices()[:1])
    declared = pipeline.checkpoint("transformer").declared
    trained = jax.tree.map(lambda x: x + 1, checkpoints.restore(tmp_path / "dst/transformer", mesh))
    shutil.rmtree(tmp_path / "dst/transformer")
    checkpoints.save(tmp_path / "dst/transformer", trained, declared)
    pipelines.export(open_pipeline(tmp_path / "dst"), tmp_path / "out")
    before, after = (
        safetensors.torch.load_file(folder / "transformer/diffusion_pytorch_model.safetensors")
        for folder in (saved("small"), tmp_path / "out")
    )
    assert set(before) == set(after)
    assert all(torch.equal(after[key], before[key] + 1) for key in before)
    assert loaded(tmp_path / "out/vae") == loaded(saved("small") / "vae")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("convert", "SRC", "DST", "--family", "wan"), "is a pipeline, and --family would be for one model"),
        (("inspect", "CKPT", "--component", "unet"), "has no 'unet', it has"),
        (("verify", "CKPT", "SRC/vae"), "holds no pipeline"),
        (("inspect", "CKPT/vae", "--component", "vae"), "is no pipeline, which --component would be for"),
        (("audit", "CKPT/vae", "--mesh", "one", "--component", "a", "--component", "b"), "2 were named"),
    ],
)
def test_what_is_for_the_other_kind_is_refused(saved, tmp_path_factory, words, named):
    ckpt = tmp_path_factory.getbasetemp() / "shared-pipeline"
    if not ckpt.exists():
        run(saved("small"), ckpt)
    swaps = {"SRC": str(saved("small")), "DST": str(ckpt.with_name("none")), "CKPT": str(ckpt)}
    head, *rest = words
    filled = [next((w.replace(k, v, 1) for k, v in swaps.items() if w.startswith(k)), w) for w in rest]
    ended = invoke(head, *filled)
    assert ended.status == 1 and named in ended.err, ended.err


def test_shards_at_the_top_of_a_folder_are_read_by_their_index(original, tmp_path):
    source = shutil.copytree(original("ti2v"), tmp_path / "source")
    whole = source / "diffusion_pytorch_model.safetensors"
    tensors = safetensors.torch.load_file(whole)
    keys, weight_map = list(tensors), {}
    for part in range(2):
        name = f"diffusion_pytorch_model-{part + 1:05d}-of-00002.safetensors"
        weight_map |= dict.fromkeys(keys[part::2], name)
        safetensors.torch.save_file({key: tensors[key] for key in keys[part::2]}, source / name)
    whole.unlink()
    (source / f"{whole.name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    found = find_pipeline(source)
    assert found.components["transformer"] == "."
    planned = pipelines.plan_components(found, list(found.components))
    assert set(planned["transformer"].plan.tensors) == set(keys) and set(planned) == set(found.components)


def test_a_single_file_beside_a_config_of_another_model_is_read_without_it(original):
    plan = conversion.plan_conversion(original("ti2v") / "Wan2.2_VAE.pth")
    assert plan.family == "wan-vae" and any("not read for family wan-vae" in note for note in plan.notes)
