"""Quantized checkpoints of a tiny FLUX.1: converted, restored so, saved, verified, exported; with adapters too."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from mesh_parity import assert_close
from safetensors.numpy import load_file, save_file
from tiny_flux import CONFIG, result

from shardzoo import checkpoints
from shardzoo.convert import convert as converting
from shardzoo.convert.convert import convert
from shardzoo.convert.export import export
from shardzoo.convert.families.flux import FAMILY, write_config
from shardzoo.convert.rules import expected
from shardzoo.convert.verify import compare, verify
from shardzoo.errors import InputError
from shardzoo.zoo import adapters, flux, layout, quantize
from shardzoo.zoo.adapters import Adapter, Factors
from shardzoo.zoo.linears import linear_layers
from shardzoo.zoo.mesh import make_mesh
from shardzoo.zoo.quantize import SCALE, VALUES, dequantize

CONFIG_BIG = dataclasses.replace(CONFIG, mlp=4 * CONFIG.embed)  # as the published configs have it
WIDE = dataclasses.replace(CONFIG, head_dim=128, heads=1, axes=(16, 56, 56), mlp=512)  # heads of the originals
LARGEST = {"int8": 0.5 / 127, "fp8": 1 / 16}


def write_source(folder, config=CONFIG_BIG, dtype=ml_dtypes.bfloat16, name="diffusers", seed=0):
    """Random weights under the names of a layout, with its config.json."""
    rules = next(one.rules for one in FAMILY.layouts if one.name == name)
    wanted = expected(rules, layout.named(flux.declare(config)), {})
    rng = np.random.default_rng(seed)
    tensors = {}
    for key, want in wanted.items():
        scale = 1 / math.sqrt(want.shape[-1]) if len(want.shape) > 1 else 0.5
        tensors[key] = (scale * rng.normal(size=want.shape) + ("norm_" in key and len(want.shape) == 1)).astype(dtype)
    folder.mkdir()
    save_file(tensors, folder / "diffusion_pytorch_model.safetensors")
    if name == "diffusers":
        (folder / "config.json").write_text(json.dumps(write_config(config, "diffusers")))
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_source(tmp_path_factory.mktemp("source") / "hf")


@pytest.fixture(scope="module")
def plain(source):
    convert(source, source.with_name("plain"), sync=False)
    return source.with_name("plain")


@pytest.fixture(scope="module", params=["int8", "fp8"])
def stored(request, source):
    path = source.with_name(request.param)
    report = convert(source, path, quantize=request.param, sync=False)
    assert report.quantized == request.param
    return request.param, path


def whole(mesh, model):
    return {path: np.asarray(leaf) for path, leaf in layout.named(model).items()}


def same(one, other):
    assert one.keys() == other.keys()
    for path in one:
        assert one[path].dtype == other[path].dtype and one[path].tobytes() == other[path].tobytes(), path


def test_stored_is_what_quantizing_the_source_gives(plain, stored):
    kind, path = stored
    full, made = checkpoints.open(plain), checkpoints.open(path)
    assert made.manifest.header.detail["quantized"] == kind == quantize.kind_of(made.declared)
    count = 0
    for leaf in made.manifest.leaves:
        if leaf.endswith(VALUES):
            root, scale = leaf.removesuffix(VALUES), leaf.removesuffix(VALUES) + SCALE
            inputs = len(made.leaf(leaf).spec.shape) - len(made.leaf(scale).spec.shape)
            values, scales = quantize.quantize(full.read(root), inputs, kind, np.dtype(ml_dtypes.bfloat16))
            assert values.tobytes() == made.read(leaf).tobytes() and scales.tobytes() == made.read(scale).tobytes()
            count += 1
        elif not leaf.endswith(SCALE):
            assert full.read(leaf).tobytes() == made.read(leaf).tobytes()
    assert count == 5 * 2 + 5
    size, before = (sum(leaf.spec.nbytes for leaf in one.manifest.leaves.values()) for one in (made, full))
    assert size < 0.62 * before
    checkpoints.verify(path)


@pytest.mark.parametrize(
    "degrees", [dict(), dict(tensor=4), dict(tensor=2, context=2), dict(data=2, tensor=2)], ids=str
)
def test_restored_at_any_degree_and_quantized_while_restoring(plain, stored, degrees):
    kind, path = stored
    mesh = make_mesh(**degrees)
    model = checkpoints.restore(path, mesh)
    made = checkpoints.restore(plain, mesh, quantize=kind, budget=1 << 12)
    same(whole(mesh, model), whole(mesh, made))
    declared = quantize.declare(checkpoints.open(plain).declared, kind)
    for leaf, param in layout.named(declared).items():
        assert layout.named(made)[leaf].sharding == param.sharding(mesh)


def test_the_model_runs_as_one_of_the_rounded_weights(plain, stored):
    _, path = stored
    ckpt, mesh = checkpoints.open(path), make_mesh(tensor=2, context=2)
    declared = layout.keep_on_host(layout.astype(ckpt.declared, np.float32), smallest=64)
    model = checkpoints.restore(ckpt, mesh, declared=declared, dtype=np.float32)
    full, one = checkpoints.open(plain), make_mesh()
    rounded = layout.named(checkpoints.restore(full, one, dtype=np.float32))
    for leaf in ckpt.manifest.leaves:
        if leaf.endswith(VALUES):
            scale = ckpt.read(leaf.removesuffix(VALUES) + SCALE)
            rounded[leaf.removesuffix(VALUES)] = jnp.asarray(dequantize(ckpt.read(leaf), scale, np.dtype(np.float32)))
    reference = layout.astype(full.declared, np.float32)
    want = result(reference, one, layout.fill(reference, rounded))
    assert_close(result(declared, mesh, model), want)
    exact = result(reference, one, checkpoints.restore(full, one, dtype=np.float32))
    assert 1e-4 < np.abs(want - exact).max() / np.abs(exact).max() < 0.5


def test_verify_reports_the_error(source, plain, stored):
    kind, path = stored
    report = verify(path, source)
    found = report.rounding
    assert found.kind == kind and verify(plain, source).rounding is None
    full, made = checkpoints.open(plain), checkpoints.open(path)
    errors = {}
    for leaf in (p for p in made.manifest.leaves if p.endswith(VALUES)):
        root = leaf.removesuffix(VALUES)
        exact = full.read(root).astype(np.float64)
        off = dequantize(made.read(leaf), made.read(root + SCALE), np.dtype(np.float32)) - exact
        errors[root] = (np.sum(off**2), np.sum(exact**2))
    total = np.sum(list(errors.values()), axis=0)
    assert found.error == pytest.approx(math.sqrt(total[0] / total[1]), rel=1e-6)
    assert 0.002 < found.error < (0.02 if kind == "int8" else 0.04)
    worst = max(errors, key=lambda root: errors[root][0] / errors[root][1])
    assert found.worst == worst and found.worst_error >= max(found.groups.values()) >= found.error
    assert set(found.groups) == {f"{s}{a}" for s in ("double.image", "double.text", "single") for a in ("", ".attn")}
    assert json.loads(json.dumps(report.to_json()))["rounding"]["kind"] == kind


def test_verify_finds_values_that_are_further_off(source, tmp_path):
    """A weight of the source changed by more than half a step, and one by less."""
    changed = tmp_path / "hf"
    changed.mkdir()
    tensors = load_file(source / "diffusion_pytorch_model.safetensors")
    key = "single_transformer_blocks.1.proj_out.weight"
    weight = tensors[key].astype(np.float32)
    step = np.abs(weight[3, :96]).max() / 127
    weight[3, 5] += 3 * step
    tensors[key] = weight.astype(ml_dtypes.bfloat16)
    convert(source, tmp_path / "int8", quantize="int8", sync=False)
    save_file(tensors, changed / "diffusion_pytorch_model.safetensors")
    (changed / "config.json").write_bytes((source / "config.json").read_bytes())
    report = compare(tmp_path / "int8", changed)
    assert [(t.key, t.different, t.first) for t in report.tensors if not t.equal] == [(key, 1, (1, 3, 0, 5))]


@pytest.mark.parametrize("options, dtype", [({}, np.float32), (dict(dtype="bf16"), ml_dtypes.bfloat16)])
def test_scales_are_of_the_models_dtype(tmp_path, options, dtype):
    source = write_source(tmp_path / "original", dtype=np.float32, name="original",
                          config=WIDE)  # fmt: skip
    convert(source / "diffusion_pytorch_model.safetensors", tmp_path / "ckpt", quantize="int8", sync=False, **options)
    made = checkpoints.open(tmp_path / "ckpt")
    assert made.leaf("single.out.weight.scale").spec.dtype == dtype
    assert made.leaf("head.out.weight").spec.dtype == dtype
    assert verify(tmp_path / "ckpt", source / "diffusion_pytorch_model.safetensors").rounding.error < 0.02


def test_export_only_when_told_to(source, plain, stored, tmp_path):
    kind, path = stored
    with pytest.raises(InputError, match=r"15 weights are quantized to .* \(double.*--dequantize"):
        export(path, tmp_path / "out")
    with pytest.raises(InputError, match="no weight is quantized: leave dequantize"):
        export(plain, tmp_path / "out", dequantize=True)
    report = export(path, tmp_path / "out", dequantize=True)
    assert report.identical == () and "quantized" in report.changed["diffusion_pytorch_model.safetensors"]
    before = load_file(source / "diffusion_pytorch_model.safetensors")
    after = load_file(tmp_path / "out" / "diffusion_pytorch_model.safetensors")
    assert before.keys() == after.keys()
    for key, weight in before.items():
        assert after[key].dtype == weight.dtype and after[key].shape == weight.shape
        off = np.abs(after[key].astype(np.float32) - weight.astype(np.float32)).max()
        quantized = weight.ndim == 2 and key.startswith(("transformer_blocks", "single_transformer_blocks"))
        most = np.abs(weight.astype(np.float32)).max() * (LARGEST[kind] + 2**-8)  # and bfloat16's own rounding
        assert (0 < off <= most) if quantized else off == 0, key
    convert(tmp_path / "out", tmp_path / "again", quantize=kind, sync=False)
    first, second = (checkpoints.open(p) for p in (path, tmp_path / "again"))
    for leaf in first.manifest.leaves:  # what was rounded once rounds to the same, but for bfloat16's own rounding
        one, other = (c.read(leaf).astype(np.float32) for c in (first, second))
        assert np.abs(one - other).max() <= np.abs(one).max() * (0.009 if kind == "int8" else 0.13)
    export(path, tmp_path / "bfl", dequantize=True, layout="original")
    assert any("double_blocks" in key for key in load_file(tmp_path / "bfl" / "flux1.safetensors"))


def test_large_leaves_of_many_files_and_an_interrupted_run(tmp_path, monkeypatch):
    """Files that hold whole rows, scales of several files; killed between values and scales it carries on."""
    monkeypatch.setattr("shardzoo.checkpoints.grid.MOST_OUTER", 1 << 12)
    monkeypatch.setattr("shardzoo.checkpoints.grid.SMALL_LEAF", 1 << 9)
    monkeypatch.setattr("shardzoo.convert.plan.SMALL_LEAF", 1 << 9)
    for name in ("diffusers", "original"):
        folder = write_source(tmp_path / name, config=WIDE, dtype=np.float32, name=name)
        file = folder if name == "diffusers" else folder / "diffusion_pytorch_model.safetensors"
        convert(file, tmp_path / f"{name}-int8", quantize="int8", sync=False)
        stops = iter(range(10**6))

        class Killed(BaseException):
            pass

        write = converting.CheckpointWriter.write

        def failing(self, *args, stops=stops, write=write, **kwargs):
            if next(stops) == 40:
                raise Killed
            return write(self, *args, **kwargs)

        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(converting.CheckpointWriter, "write", failing)
            convert(file, tmp_path / f"{name}-again", quantize="int8", sync=False)
        report = convert(file, tmp_path / f"{name}-again", quantize="int8", sync=False)
        assert report.bytes_resumed > 0
        one, other = (checkpoints.open(tmp_path / f"{name}-{end}") for end in ("int8", "again"))
        assert any(sum(1 for _ in leaf.grid.indices()) > 4 for leaf in one.manifest.leaves.values())
        assert {p: leaf.checksum for p, leaf in one.manifest.leaves.items()} == {
            p: leaf.checksum for p, leaf in other.manifest.leaves.items()
        }
        checkpoints.verify(tmp_path / f"{name}-again")
        verify(tmp_path / f"{name}-again", file)


def test_refusals(source, plain, stored, tmp_path):
    kind, path = stored
    mesh, other = make_mesh(), {"int8": "fp8", "fp8": "int8"}[kind]
    with pytest.raises(InputError, match=f"quantize='{other}', and its weights are {kind} already"):
        checkpoints.restore(path, mesh, quantize=other)
    same(whole(mesh, checkpoints.restore(path, mesh, quantize=kind)), whole(mesh, checkpoints.restore(path, mesh)))
    with pytest.raises(InputError, match="verify=True compares stored values"):
        checkpoints.restore(plain, mesh, quantize=kind, verify=True)
    with pytest.raises(InputError, match="quantize='int4' is unknown"):
        convert(source, tmp_path / "x", quantize="int4")
    bad = tmp_path / "bad"
    bad.mkdir()
    tensors = load_file(source / "diffusion_pytorch_model.safetensors")
    tensors["transformer_blocks.1.attn.to_k.weight"][7, 3] = np.nan
    save_file(tensors, bad / "diffusion_pytorch_model.safetensors")
    (bad / "config.json").write_bytes((source / "config.json").read_bytes())
    with pytest.raises(InputError, match=r"transformer_blocks.1.attn.to_k.weight: 1 output channels hold NaN"):
        convert(bad, tmp_path / "x", quantize=kind)
    assert not (tmp_path / "x").exists()
    convert(bad, tmp_path / "nan", sync=False)
    with pytest.raises(InputError, match=r"double.image.attn.qkv.weight: 1 output channels hold NaN"):
        checkpoints.restore(tmp_path / "nan", make_mesh(tensor=2), quantize=kind)


def style(declared, name, seed):
    rng = np.random.default_rng(seed)
    factors = {}
    for path, layer in linear_layers(declared).items():
        lora = adapters.declare_lora(layer, 2, np.float32)
        a, b = (0.3 * rng.normal(size=s).astype(np.float32) for s in (lora.a.shape, lora.b.shape))
        factors[path] = Factors(a=a, b=b, ratio=np.full(lora.ratio.shape, 0.5, np.float32))
    return Adapter(name=name, strength=0.7, factors=factors)


@pytest.mark.parametrize("kind", [None, "int8", "fp8"])
@pytest.mark.parametrize("adapted", [False, True], ids=["bare", "adapters"])
def test_a_sharded_model_is_saved_and_restored_at_another_degree(plain, tmp_path, kind, adapted):
    """What diffusers refuses: tensor parallel, quantized, with adapters; saved, and restored on other meshes."""
    mesh = make_mesh(tensor=4)
    ckpt = checkpoints.open(plain)
    declared = layout.astype(ckpt.declared, np.float32)
    declared = declared if kind is None else quantize.declare(declared, kind)
    model = checkpoints.restore(plain, mesh, dtype=np.float32, quantize=kind)
    if adapted:
        both = [style(declared, "one", 1), style(declared, "two", 2)]
        declared, model = adapters.attach(declared, model, mesh, both)
    checkpoints.save(tmp_path / "saved", model, declared, sync=False)
    checkpoints.save(tmp_path / "with-source", model, declared, source=ckpt, sync=False)
    saved = checkpoints.open(tmp_path / "saved")
    assert jax.tree.structure(saved.declared) == jax.tree.structure(declared)
    assert layout.named(saved.declared) == layout.named(declared)
    detail = saved.manifest.header.detail
    assert (detail.get("quantized"), detail.get("adapters")) == (kind, ["one", "two"] if adapted else None)
    for path in (tmp_path / "saved", tmp_path / "with-source"):
        for degrees in (dict(), dict(tensor=2, context=2)):
            other = make_mesh(**degrees)
            again = checkpoints.restore(path, other, verify=True)
            same(whole(other, again), whole(mesh, model))
    assert_close(result(declared, other, again), result(declared, mesh, model))
    if adapted:
        with pytest.raises(InputError, match=r"holds adapters beside .* merge them"):
            export(tmp_path / "with-source", tmp_path / "out")
    else:
        export(tmp_path / "with-source", tmp_path / "out", dequantize=kind is not None)
        exported = load_file(tmp_path / "out" / "diffusion_pytorch_model.safetensors")
        assert exported["proj_out.weight"].dtype == np.float32
