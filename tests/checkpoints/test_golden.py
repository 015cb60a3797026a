"""Checkpoints of ours in plain Orbax, both of its APIs, and a checkpoint written earlier in both."""

import dataclasses
import shutil
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as v0
import pytest
import toy_checkpoints as toy
from orbax.checkpoint import v1

from shardzoo import checkpoints
from shardzoo.zoo.layout import abstract, named
from shardzoo.zoo.mesh import make_mesh

GOLDEN = Path(__file__).parent / "golden" / "toy"
CONFIG = toy.ToyConfig(layers=2, embed=8, heads=2, kv_heads=2, head_dim=4, mlp=8, vocab=6)
CARRIED = {"rotary.inv_freq": np.arange(4, dtype=np.float32)}
ASSETS = {"config.json": b'{"model_type": "toy"}\n'}


def flat(tree):
    return {jax.tree_util.keystr(k, simple=True, separator="."): v for k, v in jax.tree.leaves_with_path(tree)}


def nested(leaves):
    """The tree that Orbax sees: dicts all the way."""
    tree = {}
    for path, leaf in leaves.items():
        *above, last = path.split(".")
        at = tree
        for key in above:
            at = at.setdefault(key, {})
        at[last] = leaf
    return tree


@pytest.fixture(params=["golden", "fresh"])
def path(request, tmp_path):
    if request.param == "golden":
        shutil.copytree(GOLDEN, tmp_path / "c")
    else:
        toy.write(tmp_path / "c", CONFIG, carried=CARRIED, assets=ASSETS)
    return tmp_path / "c"


@pytest.fixture
def stored():
    return toy.values(toy.Toy.declare(CONFIG))


def check(tree, stored):
    leaves = flat(tree)
    assert set(leaves) == set(stored)
    for name, value in leaves.items():
        assert value.dtype == stored[name].dtype and np.asarray(value).tobytes() == stored[name].tobytes(), name


def targets(degrees):
    declared = toy.Toy.declare(CONFIG)
    return nested(named(abstract(declared, make_mesh(**degrees))))


def test_the_golden_checkpoint_is_sound_and_restores(stored):
    checkpoints.verify(GOLDEN, "full")
    ckpt = checkpoints.open(GOLDEN)
    assert ckpt.config == CONFIG and ckpt.assets["config.json"].read_bytes() == ASSETS["config.json"]
    np.testing.assert_array_equal(ckpt.read("carried/rotary.inv_freq"), CARRIED["rotary.inv_freq"])
    model = checkpoints.restore(GOLDEN, make_mesh(tensor=2), verify=True)
    for name, leaf in named(model).items():
        assert np.asarray(leaf).tobytes() == stored[name].tobytes()


def test_the_writer_still_writes_the_golden_bytes(tmp_path):
    toy.write(tmp_path / "c", CONFIG, carried=CARRIED, assets=ASSETS)
    old, new = checkpoints.open(GOLDEN).manifest, checkpoints.open(tmp_path / "c").manifest
    assert dataclasses.replace(new, producer=old.producer).encode() == old.encode()
    for name in old.files:
        assert (tmp_path / "c" / name).read_bytes() == (GOLDEN / name).read_bytes(), name


def test_v1_without_a_target(path, stored):
    check(v1.load(path, checkpointable_name="params"), stored)


@pytest.mark.parametrize("degrees", [{}, {"tensor": 2}, {"data": 4, "tensor": 2}], ids=str)
def test_v1_with_shardings(path, stored, degrees):
    target = targets(degrees)
    loaded = v1.load(path, target, checkpointable_name="params")
    check(loaded, stored)
    for name, leaf in flat(loaded).items():
        assert leaf.sharding == flat(target)[name].sharding


def test_v1_all_items(path, stored):
    items = v1.load_checkpointables(path)
    check(items["params"], stored)
    assert items["manifest"]["family"] == "toy"
    np.testing.assert_array_equal(items["carried"]["t00000"], CARRIED["rotary.inv_freq"])
    about = v1.metadata(path, checkpointable_name="params").custom_metadata
    assert about["family"] == "toy" and about["version"] == 1


def test_v0_standard_checkpointer(path, stored):
    with v0.StandardCheckpointer() as checkpointer:
        check(checkpointer.restore(path / "params"), stored)
        check(checkpointer.restore(path / "params", targets({"tensor": 2})), stored)


def test_v0_pytree_and_json(path, stored):
    with v0.PyTreeCheckpointer() as checkpointer:
        check(checkpointer.restore(path / "params"), stored)
    with v0.Checkpointer(v0.CompositeCheckpointHandler()) as checkpointer:
        both = v0.args.Composite(params=v0.args.StandardRestore(), manifest=v0.args.JsonRestore())
        items = checkpointer.restore(path, both)
    check(items["params"], stored)
    assert items["manifest"]["family"] == "toy"


def test_v0_checkpoint_manager(path, stored, tmp_path):
    (tmp_path / "run").mkdir()
    shutil.copytree(path, tmp_path / "run" / "7")
    with v0.CheckpointManager(tmp_path / "run", item_names=("params", "manifest")) as manager:
        assert manager.latest_step() == 7
        items = manager.restore(7, args=v0.args.Composite(params=v0.args.StandardRestore(targets({"tensor": 2}))))
    check(items["params"], stored)


def test_parts_of_it(path, stored):
    """One leaf alone, by each of Orbax's ways to leave the others out."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {"embed": jax.ShapeDtypeStruct(stored["embed"].shape, stored["embed"].dtype, sharding=here)}
    one = {"embed": stored["embed"]}
    context = v1.Context()
    context.pytree.loading.partial_load = True
    with context:
        check(v1.load(path, nested(wanted), checkpointable_name="params"), one)
    rest = nested({name: v1.PLACEHOLDER for name in stored} | wanted)
    found = flat(v1.load(path, rest, checkpointable_name="params"))
    check({name: leaf for name, leaf in found.items() if leaf is not v1.PLACEHOLDER}, one)
    with v0.PyTreeCheckpointer() as checkpointer:
        args = v0.args.PyTreeRestore(item=nested(wanted), partial_restore=True)
        check(checkpointer.restore(path / "params", args=args), one)


def test_an_unfinished_one_is_none_to_orbax(tmp_path):
    leaves = toy.specs_of(toy.Toy.declare(CONFIG))
    with checkpoints.CheckpointWriter(tmp_path / "run" / "7", toy.header(CONFIG), leaves, "p"):
        pass
    (unfinished,) = (tmp_path / "run").iterdir()
    assert not v1.is_orbax_checkpoint(unfinished)
    with v0.CheckpointManager(tmp_path / "run") as manager:
        assert manager.latest_step() is None
