"""Models out of Orbax checkpoints of other people, by a mapping of names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_training as toy

from shardzoo import checkpoints, zoo
from shardzoo.errors import InputError
from shardzoo.zoo.layout import Param, astype, named


def foreign(path, **items):
    """An Orbax checkpoint by Orbax itself, with names of its own."""
    from orbax.checkpoint import v1 as ocp

    ocp.save_checkpointables(path, items)
    return path


def their_names(values):
    """A model as someone else keeps it: lists of layers are not there, names and order differ."""
    blocks = {"ln": values["blocks.norm"], "fc": [values["blocks.up"], values["blocks.down"]]}
    return {"wte": values["embed"], "h": blocks, "lm_head": {"kernel": values["head"]}}


MAPPING = {
    "embed": "wte",
    "blocks.up": "h.fc.0",
    "blocks.down": "h.fc.1",
    "blocks.norm": "h.ln",
    "head": "lm_head.kernel",
}


def test_from_an_orbax_checkpoint_of_someone_else(tmp_path):
    declared = toy.declare({"data": 2}, True)
    rng = np.random.default_rng(1)
    values = {p: rng.standard_normal(q.shape).astype(np.float32) for p, q in named(declared).items()}
    path = foreign(tmp_path / "theirs", params=their_names(values), counts={"n": np.arange(3)})
    mesh = zoo.make_mesh(data=2, tensor=2, pipe=2)
    with pytest.raises(InputError, match="item=None holds no arrays: use item= with one of"):
        checkpoints.restore_orbax(path, mesh, declared, MAPPING)
    model = checkpoints.restore_orbax(path, mesh, declared, MAPPING, item="params")
    for name, leaf in named(model).items():
        np.testing.assert_array_equal(leaf, values[name])
        assert leaf.sharding == named(declared)[name].sharding(mesh), name
    tied = {**MAPPING, "head": "wte"}
    model = checkpoints.restore_orbax(path, mesh, declared, tied, item="params", dtype=jnp.bfloat16)
    np.testing.assert_array_equal(model.head, values["embed"].astype(jnp.bfloat16))
    model = checkpoints.restore_orbax(path, mesh, declared, {**MAPPING, "head": None}, item="params")
    assert isinstance(model.head, Param) and isinstance(model.embed, jax.Array)
    other = toy.declare(config=toy.ToyTrainingConfig(vocab=60))
    wrong = {"embed": "wte", "blocks.*": "h.*", "blocs.*": "h.*"}
    with pytest.raises(InputError) as caught:
        checkpoints.restore_orbax(path, zoo.make_mesh(tensor=8), astype(other, jnp.bfloat16), wrong, item="params")
    for part in (
        "mapping: 'blocs.*' matches no declared leaf",
        "head: declared, and no pattern of the mapping matches it",
        "blocks.up: is 'h.up' by the mapping, which is not stored",
        "embed: wte is stored with shape [64, 32], declared [60, 32]",
        "embed: wte is stored as float32, declared bfloat16: pass dtype= to cast",
        "vocab=60 does not divide by 8",
    ):
        assert part in str(caught.value), caught.value
    with pytest.raises(InputError, match="is not an Orbax checkpoint"):
        checkpoints.restore_orbax(tmp_path / "nothing", mesh, declared, MAPPING)


def test_renamed_heads_of_a_step(tmp_path):
    class Renamed(toy.eqx.Module):
        body: object
        score: object

    c = toy.ToyTrainingConfig()
    declared = Renamed(body=toy.stack(toy.Block.declare(c), c.layers), score=toy.declare().head)
    mapping = {"body.*": "blocks.*", "score": "head"}
    run = toy.Run({"data": 2}, True)
    state = run.first()
    with run.training(tmp_path) as training:
        training.save(state)
    model = checkpoints.restore_orbax(tmp_path / "0", zoo.make_mesh(tensor=2), declared, mapping, item="params")
    np.testing.assert_array_equal(model.score, state.model.head)
    np.testing.assert_array_equal(model.body.down, state.model.blocks.down)
