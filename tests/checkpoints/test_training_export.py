"""A step of a run that began from converted weights goes back to the layout they came in."""

import dataclasses

import jax
import numpy as np
import optax
import tiny_llama
from safetensors.numpy import load_file

from shardzoo import checkpoints, zoo
from shardzoo.convert.convert import convert
from shardzoo.convert.export import export
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
    original = load_file(source / "model.safetensors")
    for name, path, factor in (("a", tmp_path / "run/0", 1), ("b", tmp_path / "run", 2)):
        export(path, tmp_path / name)
        written = load_file(tmp_path / name / "model.safetensors")
        assert written.keys() == original.keys()
        for key, value in original.items():
            np.testing.assert_array_equal(written[key], factor * value, err_msg=key)
