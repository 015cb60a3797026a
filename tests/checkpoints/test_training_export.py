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
