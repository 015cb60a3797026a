"""Restoring: every mesh, dtypes, parts, and what is refused before a file is opened."""

import dataclasses
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
import toy_checkpoints as toy
from jax.sharding import AxisType, Mesh

from shardzoo import checkpoints
from shardzoo.checkpoints import restore as restore_function
from shardzoo.errors import InputError
from shardzoo.zoo import families
from shardzoo.zoo.layout import HOST, Param, keep_on_host, named, split_at_rest
from shardzoo.zoo.mesh import Degrees, make_mesh

MESHES = [
    {},
    {"tensor": 2},
    {"tensor": 4, "kv_heads": 2},
    {"tensor": 8, "kv_heads": 2},
    {"data": 2, "tensor": 4, "kv_heads": 2},
    {"context": 4, "tensor": 2},
    {"data": 8},
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "ckpt"
    return path, toy.write(path, carried={"x": np.arange(3)})


def check_equal(model, stored):
    live = named(model)
    assert set(live) == {p for p in stored if not p.startswith("carried/")}
    for path, leaf in live.items():
        assert leaf.dtype == stored[path].dtype, path
        assert np.asarray(leaf).tobytes() == stored[path].tobytes(), path


@pytest.mark.parametrize("degrees", MESHES, ids=str)
def test_same_values_on_every_mesh_split_as_declared(saved, degrees):
    path, stored = saved
    mesh = make_mesh(**degrees)
    model = checkpoints.restore(path, mesh, verify=True)
    check_equal(model, stored)
    declared = toy.Toy.declare(toy.ToyConfig())
    for name, param in named(declared).items():
        leaf = named(model)[name]
        assert leaf.sharding == jax.sharding.NamedSharding(mesh, param.spec), name
    assert model.config == toy.ToyConfig() and isinstance(model, toy.Toy)
    assert checkpoints.checksum(model) == {p: e.checksum for p, e in checkpoints.open(path).manifest.leaves.items()}


def test_weights_split_at_rest(saved):
    path, stored = saved
    degrees = Degrees(data=4, tensor=2, kv_heads=2)
    declared = split_at_rest(toy.Toy.declare(toy.ToyConfig()), "data", degrees, smallest=100)
    typed = jax.tree.map(lambda p: p, declared)
    model = checkpoints.restore(path, make_mesh(data=4, tensor=2, kv_heads=2), declared=typed)
    check_equal(model, stored)
    assert model.blocks.q.sharding.shard_shape(model.blocks.q.shape) == (3, 4, 16, 16)


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_blocks_kept_on_the_host(saved, tmp_path, dtype):
    path, stored = saved
    mesh = make_mesh(data=2, tensor=2)
    declared = keep_on_host(checkpoints.open(path).declared, smallest=1000)
    model = checkpoints.restore(path, mesh, declared=declared, dtype=dtype, verify=True)
    moved = {p for p, q in named(declared).items() if q.memory == "host"}
    assert {p for p, leaf in named(model).items() if leaf.sharding.memory_kind == HOST} == moved
    assert "blocks.q" in moved and "blocks.scale" not in moved and "embed" not in moved
    if dtype is None:
        check_equal(model, stored)
        assert checkpoints.checksum(model)["blocks.q"] == checkpoints.open(path).leaf("blocks.q").checksum
        checkpoints.save(tmp_path / "again", model, declared, source=checkpoints.open(path))
        check_equal(checkpoints.restore(tmp_path / "again", make_mesh(), verify=True), stored)
    else:
        np.testing.assert_array_equal(model.blocks.q, stored["blocks.q"].astype(dtype))


def test_a_part_of_the_model(saved):
    """Fewer leaves, and the first of stacked blocks: an encoder made of a decoder's first layers."""
    path, stored = saved
    whole, mesh = checkpoints.open(path).declared, make_mesh(tensor=2)

    def part(layers):
        cut = jax.tree.map(lambda p: dataclasses.replace(p, shape=(layers, *p.shape[1:])), whole.blocks)
        return dataclasses.replace(whole, blocks=cut, heads=[])

    model = named(checkpoints.restore(path, mesh, declared=part(2), part=True))
    assert not any(p.startswith("heads") for p in model) and "blocks.q" in model
    for leaf, value in model.items():
        np.testing.assert_array_equal(value, stored[leaf][:2] if leaf.startswith("blocks") else stored[leaf])
    with pytest.raises(InputError, match=r"heads\.0: in the checkpoint, but not declared(.|\n)*q: stored with"):
        checkpoints.restore(path, mesh, declared=part(2))
    with pytest.raises(InputError, match=r"blocks\.q: stored with shape"):
        checkpoints.restore(path, mesh, declared=part(4), part=True)
    with pytest.raises(InputError, match="leave out one of them"):
        checkpoints.restore(path, mesh, declared=part(2), part=True, verify=True)


def test_under_an_active_mesh(saved):
    path, stored = saved
    mesh = make_mesh(tensor=2)
    other = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    for active in (mesh, other):
        with jax.set_mesh(active):
            check_equal(checkpoints.restore(path, mesh, verify=True), stored)


@pytest.mark.parametrize("verify", [False, True])
def test_cast(saved, verify):
    path, stored = saved
    model = checkpoints.restore(path, make_mesh(tensor=2), dtype="float32", verify=verify)
    for name, leaf in named(model).items():
        value = stored[name]
        floating = jax.numpy.issubdtype(value.dtype, np.floating)
        np.testing.assert_array_equal(np.asarray(leaf), value.astype(np.float32) if floating else value, err_msg=name)
        assert leaf.dtype == (np.float32 if floating else value.dtype)
    half = checkpoints.restore(path, make_mesh(), dtype=ml_dtypes.bfloat16, verify=verify)
    np.testing.assert_array_equal(np.asarray(half.blocks.bias), stored["blocks.bias"].astype(ml_dtypes.bfloat16))


def test_include(saved):
    path, stored = saved
    model = checkpoints.restore(path, make_mesh(tensor=2), include=["blocks.*", "heads.1"])
    for name, leaf in named(model).items():
        if name.startswith("blocks.") or name == "heads.1":
            assert np.asarray(leaf).tobytes() == stored[name].tobytes()
        else:
            assert isinstance(leaf, Param)
    with pytest.raises(InputError, match=r"include='block\.\*' matches no leaf"):
        checkpoints.restore(path, make_mesh(), include=["blocks.*", "block.*"])


def test_the_smallest_budget_is_enough(saved):
    path, stored = saved
    check_equal(checkpoints.restore(path, make_mesh(tensor=2), budget=1), stored)


def test_large_shards_reach_an_accelerator_in_pieces(saved, monkeypatch):
    path, stored = saved
    module = __import__("sys").modules["shardzoo.checkpoints.restore"]
    monkeypatch.setattr(module, "PIECE", 1000)
    monkeypatch.setattr(module, "_shares_host_memory", lambda devices: False)
    check_equal(checkpoints.restore(path, make_mesh(data=2, tensor=2), verify=True), stored)
    cast = checkpoints.restore(path, make_mesh(tensor=2), dtype="float32")
    np.testing.assert_array_equal(np.asarray(cast.embed), stored["embed"].astype(np.float32))


def remove_data(path, tmp_path):
    """A copy without any data file: whatever is refused on it is refused before one is opened."""
    copy = tmp_path / "no-data"
    shutil.copytree(path, copy)
    for data in copy.glob("params/*/c"):
        shutil.rmtree(data) if data.is_dir() else data.unlink()
    return copy


def test_everything_that_does_not_fit_is_refused_at_once_before_data_is_opened(saved, tmp_path):
    path = remove_data(saved[0], tmp_path)
    with pytest.raises(InputError) as error:
        checkpoints.restore(path, make_mesh(tensor=8))
    assert "kv_heads=2" in str(error.value) and "vocab=56" not in str(error.value)
    with pytest.raises(InputError, match="heads=8"):
        checkpoints.restore(path, Mesh(np.array(jax.devices()[:6]).reshape(1, 1, 1, 1, 6), tuple(make_mesh().shape)))
    with pytest.raises(InputError, match="family='toy' is not 'llama'"):
        checkpoints.restore(path, make_mesh(), family="llama")
    wrong = toy.Toy.declare(toy.ToyConfig(layers=4, mlp=128))
    with pytest.raises(InputError) as error:
        checkpoints.restore(path, make_mesh(), declared=wrong)
    for part in (
        "blocks.q: stored with shape [3, 8, 16, 64] (layer=3, heads=8",
        "declared [4, 8, 16, 64]",
        "blocks.up",
    ):
        assert part in str(error.value)
    tree = dataclasses.replace(toy.Toy.declare(toy.ToyConfig()), heads=[], count={"other": Param("", ())})
    with pytest.raises(InputError) as error:
        checkpoints.restore(path, make_mesh(), declared=tree)
    for part in ("heads.0: in the checkpoint, but not declared", "count.other: declared, but not in the checkpoint"):
        assert part in str(error.value)
    dims = dataclasses.replace(toy.Toy.declare(toy.ToyConfig()), embed=Param("vocab mlp", (56, 64), {}, toy.BF16))
    with pytest.raises(InputError, match=r"embed: stored with dims 'vocab embed', declared 'vocab mlp'"):
        checkpoints.restore(path, make_mesh(), declared=dims)


def test_another_dtype_than_declared_is_refused_unless_asked_for(saved):
    path = saved[0]
    declared = toy.Toy.declare(toy.ToyConfig())
    other = dataclasses.replace(declared, embed=dataclasses.replace(declared.embed, dtype=np.dtype("float32")))
    with pytest.raises(InputError, match="embed: stored as bfloat16, declared float32: pass dtype="):
        checkpoints.restore(path, make_mesh(), declared=other)
    assert checkpoints.restore(path, make_mesh(), declared=other, dtype="float32").embed.dtype == np.float32


def test_dtypes_by_the_names_that_users_write(saved):
    path, _ = saved
    for name in ("bf16", "bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)):
        model = checkpoints.restore(path, make_mesh(), dtype=name, include="embed")
        assert model.embed.dtype == ml_dtypes.bfloat16
    for name in ("int8", "bf15", np.int32, object()):
        with pytest.raises(InputError, match=r"restore: dtype=.* is no floating-point dtype: use float32"):
            checkpoints.restore(path, make_mesh(), dtype=name)


def test_an_unknown_family_and_a_config_of_another_version(tmp_path):
    toy.write(tmp_path / "a")
    family = families.FAMILIES.pop("toy")
    try:
        with pytest.raises(InputError, match="family='toy' is not in this zoo"):
            checkpoints.restore(tmp_path / "a", make_mesh())
    finally:
        families.register(family)


def test_64_bit_leaves_are_not_narrowed_silently(tmp_path):
    declared = {"w": Param("a", (4,), {}, np.dtype("float64")), "i": Param("a", (4,), {}, np.dtype("int64"))}
    specs = {k: checkpoints.LeafSpec.of(v) for k, v in declared.items()}
    with checkpoints.CheckpointWriter(tmp_path / "c", toy.header(), specs, "p") as writer:
        for name, param in declared.items():
            toy.put(writer, name, np.arange(4).astype(param.dtype))
        writer.publish()
    with pytest.raises(InputError, match=r"i: int64\n  w: float64") as error:
        checkpoints.restore(tmp_path / "c", make_mesh(), declared=declared)
    assert "jax_enable_x64" in str(error.value)
    with jax.enable_x64(True):
        model = checkpoints.restore(tmp_path / "c", make_mesh(), declared=declared, verify=True)
    assert model["i"].dtype == np.int64 and np.asarray(model["w"]).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
@pytest.mark.parametrize("checked", [False, True])
def test_a_damaged_file_is_named(saved, tmp_path, damage, checked):
    copy = tmp_path / "copy"
    shutil.copytree(saved[0], copy)
    file = copy / "params/blocks.q/c/0/0/0/0"
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[1000] ^= 4
        file.write_bytes(data)
    elif damage == "truncate":
        file.write_bytes(data[:-1])
    else:
        file.unlink()
    with pytest.raises(InputError) as error:
        checkpoints.restore(copy, make_mesh(tensor=2), verify=checked)
    assert "blocks.q: " in str(error.value) and "params/blocks.q/" in str(error.value)


def test_values_that_change_on_the_way_to_the_device_are_found(saved, monkeypatch):
    real = jax.device_put

    def flips(value, device=None, **options):
        value = np.array(value)
        if value.shape == (56, 64):
            value.view(np.uint16)[3, 5] ^= 1 << 15
        return real(value, device, **options)

    monkeypatch.setattr(jax, "device_put", flips)
    with pytest.raises(InputError, match=r"embed: checksum .* on the devices is not"):
        checkpoints.restore(saved[0], make_mesh(), verify=True)
    assert restore_function is checkpoints.restore


def test_replicas_that_share_host_memory_survive_each_other(saved):
    """On the CPU the copies of a whole leaf share memory; a donated one must not take the others along."""
    path, stored = saved
    model = checkpoints.restore(path, make_mesh(data=8))
    first, *others = [s.data for s in model.embed.addressable_shards]
    jax.block_until_ready(jax.jit(lambda a: a * 0, donate_argnums=0)(first))
    for other in others:
        assert np.asarray(other).tobytes() == stored["embed"].tobytes()


@pytest.mark.parametrize("degrees", [{}, {"tensor": 4, "kv_heads": 2}, {"data": 2, "tensor": 2}], ids=str)
def test_saved_live_and_restored_elsewhere(saved, tmp_path, degrees):
    path, stored = saved
    ckpt = checkpoints.open(path)
    model = checkpoints.restore(ckpt, make_mesh(**degrees))
    with jax.set_mesh(make_mesh(data=2)):
        checkpoints.save(tmp_path / "again", model, toy.Toy.declare(toy.ToyConfig()), source=ckpt)
    checkpoints.verify(tmp_path / "again")
    check_equal(checkpoints.restore(tmp_path / "again", make_mesh(tensor=2), verify=True), stored)
    again = checkpoints.open(tmp_path / "again")
    assert again.read("carried/x").tolist() == [0, 1, 2]
    assert again.manifest.leaves == ckpt.manifest.leaves
    for name in ckpt.manifest.files:
        assert (tmp_path / "again" / name).read_bytes() == (path / name).read_bytes(), name


def test_a_live_model_without_a_source_takes_family_and_config_from_itself(saved, tmp_path):
    path, stored = saved
    model = checkpoints.restore(path, make_mesh(tensor=2), dtype="float32")
    checkpoints.save(tmp_path / "wide", model, toy.Toy.declare(toy.ToyConfig()), assets={"a": b"b"})
    wide = checkpoints.open(tmp_path / "wide")
    assert wide.config == toy.ToyConfig() and wide.leaf("embed").spec.dtype == np.float32
    np.testing.assert_array_equal(wide.read("embed"), stored["embed"].astype(np.float32))
    assert wide.assets["a"].read_bytes() == b"b"


def test_the_declaration_of_a_checkpoint_has_the_stored_dtypes(saved, tmp_path):
    path, stored = saved
    declared = toy.Toy.declare(toy.ToyConfig())
    assert checkpoints.open(path).declared == declared
    checkpoints.save(tmp_path / "wide", checkpoints.restore(path, make_mesh(), dtype="float32"), declared)
    wide = checkpoints.open(tmp_path / "wide").declared
    for name, param in named(wide).items():
        assert dataclasses.replace(param, dtype=stored[name].dtype) == named(declared)[name]
        assert param.dtype == (np.int32 if name == "count" else np.float32)
    part = checkpoints.restore(tmp_path / "wide", make_mesh(), declared=wide, include=["embed"])
    assert part.embed.dtype == np.float32 and part.blocks.q == wide.blocks.q


def test_a_model_that_is_not_of_its_declaration_is_not_saved(saved, tmp_path):
    path, _ = saved
    part = checkpoints.restore(path, make_mesh(), include=["blocks.*"])
    with pytest.raises(InputError, match="embed: is Param, not a jax array"):
        checkpoints.save(tmp_path / "x", part, toy.Toy.declare(toy.ToyConfig()))
    whole = checkpoints.restore(path, make_mesh())
    with pytest.raises(InputError, match=r"blocks.up: has shape \[3, 96, 64\], declared \[3, 128, 64\]"):
        checkpoints.save(tmp_path / "x", whole, toy.Toy.declare(toy.ToyConfig(mlp=128)))
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_fails_leaves_nothing(saved, tmp_path):
    path, _ = saved
    model = checkpoints.restore(path, make_mesh(tensor=2))
    declared = toy.Toy.declare(toy.ToyConfig())
    for assets in ({"../x": b""}, {"x": tmp_path / "nothing"}):
        with pytest.raises(InputError, match=r"reaches outside|cannot be read"):
            checkpoints.save(tmp_path / "x", model, declared, assets=assets)
        assert list(tmp_path.iterdir()) == []


def resident():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096


def test_memory_does_not_grow_over_saves_and_restores(tmp_path):
    config = toy.ToyConfig(layers=4, embed=512, heads=8, kv_heads=4, head_dim=64, mlp=2048, vocab=4096)
    stored = toy.write(tmp_path / "c", config)
    size = sum(a.nbytes for a in stored.values())
    declared = toy.Toy.declare(config)

    def once():
        model = checkpoints.restore(tmp_path / "c", make_mesh(tensor=4))
        checkpoints.save(tmp_path / "d", model, declared)
        shutil.rmtree(tmp_path / "d")

    for _ in range(2):
        once()
    before = resident()
    for _ in range(6):
        once()
    assert resident() - before < 2 * size
