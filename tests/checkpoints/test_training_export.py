"""A step of a run that began from converted weights goes back to the layout they came in."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
import tiny_llama
from safetensors.numpy import load_file

from shardzoo import checkpoints, zoo
from shardzoo.cli.targets import find_target
from shardzoo.convert.convert import convert
from shardzoo.convert.export import export
from shardzoo.errors import InputError
from shardzoo.zoo import optimizer_state
from shardzoo.zoo.linears import linear_layers


def test_a_step_is_exported_to_the_layout_that_the_run_began_from(tmp_path):
    source = tiny_llama.write(tmp_path / "hf")
    convert(source, tmp_path / "ckpt", sync=False)
    began = checkpoints.open(tmp_path / "ckpt")
    mesh, optimizer = zoo.make_mesh(tensor=2, kv_heads=2), optax.adam(1e-3)
    model = checkpoints.restore(began, mesh)
    opt_state = optimizer_state.init(optimizer, model, began.declared, mesh)
    state = checkpoints.TrainingState(model=model, opt_state=opt_state, step=np.int32(0), key=jax.random.key(0))
    with checkpoints.Training(tmp_path / "run", began.declared, optimizer, mesh, source=began) as run:
        run.save(state)
        run.save(dataclasses.replace(state, model=jax.tree.map(lambda w: 2 * w, model)), step=1)
    assert set(checkpoints.open(tmp_path / "run").assets) == set(began.assets)
    target = find_target(str(tmp_path / "run"))  # as `audit` takes it
    assert target.kind == "checkpoint" and target.declared == checkpoints.open(tmp_path / "run/1").declared
    original = load_file(source / "model.safetensors")
    for name, path, factor in (("a", tmp_path / "run/0", 1), ("b", tmp_path / "run", 2)):
        export(path, tmp_path / name)
        written = load_file(tmp_path / name / "model.safetensors")
        assert written.keys() == original.keys()
        for key, value in original.items():
            np.testing.assert_array_equal(written[key], factor * value, err_msg=key)


def test_tensors_that_no_model_runs_go_along_into_every_step(tmp_path):
    """They come back with a step's weights, and are found damaged like these; a second run has them from the first."""
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.arange(4, dtype=np.float32)}
    source = tiny_llama.write(tmp_path / "hf", {**tiny_llama.tensors(), **extra})
    convert(source, tmp_path / "ckpt", sync=False)
    came, mesh, optimizer = checkpoints.open(tmp_path / "ckpt"), zoo.make_mesh(tensor=2), optax.adam(1e-3)
    assert list(came.manifest.carried) == list(extra)
    for name in ("first", "second"):
        model = checkpoints.restore(came, mesh)
        opt_state = optimizer_state.init(optimizer, model, came.declared, mesh)
        state = checkpoints.TrainingState(model=model, opt_state=opt_state, step=np.int32(0), key=jax.random.key(0))
        with checkpoints.Training(tmp_path / name, came.declared, optimizer, mesh, source=came) as run:
            run.save(state)
            run.wait()
            restored = run.restore()
        jax.tree.map(np.testing.assert_array_equal, restored.model, model)
        came = checkpoints.open(tmp_path / name)
        export(came, tmp_path / f"{name}-hf")
        written, original = (load_file(f / "model.safetensors") for f in (tmp_path / f"{name}-hf", source))
        assert written.keys() == original.keys()
        for key, value in original.items():
            np.testing.assert_array_equal(written[key], value, err_msg=key)
    checkpoints.verify(came.path)
    file = next((came.path / "carried").rglob("c/0"))
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(data)
    with pytest.raises(InputError, match=r"carried/model.layers.0.self_attn.rotary_emb.inv_freq"):
        checkpoints.verify(came.path)


@pytest.mark.parametrize("kind", [None, "int8"])
def test_adapters_that_are_merged_are_exported(tmp_path, kind):
    """As after training them: beside the weights in a run's step, merged into what was restored from it, saved."""
    source = tiny_llama.write(tmp_path / "hf")
    convert(source, tmp_path / "ckpt", quantize=kind, sync=False)
    came, mesh = checkpoints.open(tmp_path / "ckpt"), zoo.make_mesh()
    layers = linear_layers(came.declared)
    lora = zoo.adapters.declare_lora(layers["blocks.mlp.down.weight"], 2, np.float32)
    ones = zoo.adapters.Factors(**{n: np.ones(getattr(lora, n).shape, np.float32) for n in ("a", "b", "ratio")})
    norm = {"norm.weight": np.ones(came.config.embed, np.float32)}
    style = zoo.adapters.Adapter(
        name="style", strength=0.5, factors=dict.fromkeys(["blocks.mlp.down.weight"], ones), differences=norm
    )
    declared, model = zoo.adapters.attach(came.declared, checkpoints.restore(came, mesh), mesh, [style])
    checkpoints.save(tmp_path / "apart", model, declared, source=came, sync=False)
    with pytest.raises(InputError, match="holds adapters beside 2 weights"):
        export(tmp_path / "apart", tmp_path / "never")
    apart = checkpoints.open(tmp_path / "apart")
    merged = zoo.adapters.merge(apart.declared, checkpoints.restore(apart, mesh), dequantize=kind is not None)
    checkpoints.save(tmp_path / "merged", *reversed(merged), source=apart, sync=False)
    export(tmp_path / "ckpt", tmp_path / "before", dequantize=kind is not None)
    export(tmp_path / "merged", tmp_path / "after", dequantize=kind is not None)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("before", "after"))
    assert before.keys() == after.keys()
    for key, value in before.items():
        added = 1.0 if key.endswith("down_proj.weight") else 0.0  # strength 0.5, ratio 1, rank 2
        added = 0.5 if key == "model.norm.weight" else added
        expected = (value.astype(np.float32) + added).astype(value.dtype).astype(np.float32)
        rounded_twice = 0 if kind is None or not added else 2**-5  # one step of bfloat16 below 8
        np.testing.assert_allclose(after[key].astype(np.float32), expected, rtol=0, atol=rounded_twice, err_msg=key)
