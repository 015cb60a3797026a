"""Runs that stop and go on: on another mesh, with something changed, and what stays in their folder."""

import dataclasses
import json
import logging
import math
import os
import shutil
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy_training as toy

from shardzoo import checkpoints, zoo
from shardzoo.checkpoints.orbax_layout import MARKS_FILE, STAGING_SUFFIX
from shardzoo.checkpoints.staging import listing
from shardzoo.checkpoints.training_state import checked_step
from shardzoo.errors import InputError
from shardzoo.zoo import optimizer_state
from shardzoo.zoo.layout import Param, astype, named, place

STEPS = 20
CLOSE = 2e-5  # of a loss: float32 sums taken in another order, over 20 steps of AdamW


@pytest.fixture(scope="module")
def one_device():
    return toy.Run({})


@pytest.fixture(scope="module")
def reference(one_device):
    """Losses and examples of the uninterrupted run."""
    _, losses, examples = one_device.go(one_device.first(), 3 + 2 * STEPS)
    return losses, examples


def arrays(state):
    return {p: np.asarray(a) for p, a in named((state.model, state.opt_state)).items()}


def check_goes_on(run, folder, reference, steps=STEPS):
    """Restores the last step and takes some more: the same losses, the next examples."""
    with run.training(folder) as training:
        state = training.restore()
    at = int(state.step)
    _, losses, examples = run.go(state, steps)
    np.testing.assert_allclose(losses, reference[0][at : at + steps], rtol=CLOSE)
    assert examples == reference[1][at * toy.BATCH : (at + steps) * toy.BATCH]


@pytest.mark.parametrize(
    ("before", "after"),
    [(toy.MESHES[0], toy.MESHES[19]), (toy.MESHES[21], toy.MESHES[0])],
    ids=str,
)
def test_a_run_goes_on_on_another_mesh(tmp_path, reference, before, after):
    run = toy.Run(*before)
    state, losses, _ = run.go(run.first(), 3)
    np.testing.assert_allclose(losses, reference[0][:3], rtol=CLOSE)
    with run.training(tmp_path) as training:
        assert training.save(state)
    check_goes_on(toy.Run(*after), tmp_path, reference)


@pytest.mark.slow
def test_from_every_mesh_to_every_mesh(tmp_path, reference):
    runs = [toy.Run(*mesh) for mesh in toy.MESHES]
    assert len(runs) >= 20
    for i, run in enumerate(runs):
        state, _, _ = run.go(run.first(), 3)
        with run.training(tmp_path / str(i)) as training:
            training.save(state)
    for i, _ in enumerate(runs):
        for run in runs:
            check_goes_on(run, tmp_path / str(i), reference)


def test_everything_comes_back_bit_for_bit(tmp_path, one_device):
    state, _, _ = one_device.go(one_device.first(), 2)
    kept, key = arrays(state), np.asarray(jax.random.key_data(state.key))
    with one_device.training(tmp_path) as training:
        training.save(state)
        one_device.go(state, 1)  # donates the state while it is being written
        training.wait()
        assert training.steps == [2]
        found = training.restore()
    again = arrays(found)
    assert kept.keys() == again.keys()
    for path, value in kept.items():
        np.testing.assert_array_equal(value, again[path], err_msg=path)
    assert found.step.dtype == jnp.int32 and int(found.step) == 2 and found.data == {"examples": 16}
    np.testing.assert_array_equal(jax.random.key_data(found.key), key)
    assert jax.random.key_impl(found.key) == jax.random.key_impl(jax.random.key(0))


def test_state_lies_like_its_parameters(tmp_path):
    run = toy.Run({"data": 2, "tensor": 2, "pipe": 2}, True)
    state = run.first()
    with run.training(tmp_path) as training:
        training.save(state)
        found = training.restore()
    for path, param in named(run.declared_state).items():
        assert named(found.opt_state)[path].sharding == param.sharding(run.mesh), path
    spec = named(run.declared_state)["1.0.mu.blocks.up"].spec
    assert spec == named(run.declared)["blocks.up"].spec and "data" in str(spec) and "pipe" in str(spec)


def test_raw_keys_and_positions_of_any_json(tmp_path, one_device):
    state = dataclasses.replace(
        one_device.first(), key=jax.random.PRNGKey(3), data={"file": "a", "at": [jnp.int32(4), 2.5, None]}
    )
    with one_device.training(tmp_path) as training:
        training.save(state)
        found = training.restore()
        with pytest.raises(InputError, match="data holds a set, which is not JSON"):
            training.save(dataclasses.replace(state, data={1, 2}), step=1)
    np.testing.assert_array_equal(found.key, jax.random.PRNGKey(3))
    assert found.data == {"file": "a", "at": [4, 2.5, None]}


def saved(run, folder, steps, **options):
    """Saves of these steps with their losses as metrics; returns those that stay."""
    state = run.first()
    with run.training(folder, **options) as training:
        training.restore()
        for step, loss in steps:
            training.save(dataclasses.replace(state, step=jnp.int32(step)), metrics={"loss": loss})
    return training.steps


def test_the_last_and_the_best_are_kept(tmp_path, one_device):
    steps = [(1, 5.0), (2, 1.0), (3, 4.0), (4, math.nan), (5, 3.0), (6, 2.0)]
    assert saved(one_device, tmp_path / "a", steps, keep=2) == [5, 6]
    assert saved(one_device, tmp_path / "b", steps, keep=2, best="loss") == [2, 5, 6]
    assert saved(one_device, tmp_path / "c", steps, keep=1, best="-loss") == [1, 6]
    assert saved(one_device, tmp_path / "d", steps, keep=None) == [1, 2, 3, 4, 5, 6]
    assert saved(one_device, tmp_path / "b", [(7, 9.0), (8, 8.0)], keep=2, best="loss") == [2, 7, 8]
    assert sorted(os.listdir(tmp_path / "b")) == ["2", "7", "8"]
    with (
        pytest.raises(InputError, match="best='loss' is not among its metrics"),
        one_device.training(tmp_path / "e", best="loss") as training,
    ):
        training.save(one_device.first())


def test_saves_are_due_by_step_and_by_time(tmp_path, one_device, monkeypatch):
    state = one_device.first()
    now = [0.0]
    monkeypatch.setattr("shardzoo.checkpoints.training.time.monotonic", lambda: now[0])
    with one_device.training(tmp_path, every=4, seconds=10, keep=None) as training:
        due = []
        for step in range(1, 10):
            now[0] += 3
            due.append(training.save(state, step=step))
        assert due == [False, False, False, True, False, False, False, True, False]
        now[0] += 10
        assert training.save(state, step=11) and not training.save(state, step=11)
        assert training.save(state, step=13, force=True)
    assert training.steps == [4, 8, 11, 13]


def test_what_a_killed_run_left_is_removed(tmp_path, one_device):
    for name in ("5" + STAGING_SUFFIX, "3.removed" + STAGING_SUFFIX):
        (tmp_path / name / "params").mkdir(parents=True)
    with one_device.training(tmp_path) as training:
        assert training.restore() is None and training.steps == []
        training.save(one_device.first())
        with pytest.raises(InputError, match="another run is using it"):
            one_device.training(tmp_path)
    assert os.listdir(tmp_path) == ["0"]


def test_going_on_from_an_earlier_step_gives_up_the_later_ones(tmp_path, one_device, reference):
    state = one_device.first()
    with one_device.training(tmp_path, keep=None) as training:
        for _ in range(4):
            state, _, _ = one_device.go(state, 1)
            training.save(state)
    with one_device.training(tmp_path, keep=None) as training:
        with pytest.raises(InputError, match="holds steps up to 4, and this run has restored none"):
            training.save(one_device.first())
        with pytest.raises(InputError, match="has no step 9: there are 1, 2, 3, 4"):
            training.restore(9)
        state = training.restore(2)
        assert training.steps == [1, 2, 3, 4]
        state, losses, _ = one_device.go(state, 1)
        assert training.save(state)
    assert training.steps == [1, 2, 3]
    np.testing.assert_allclose(losses, reference[0][2:3], rtol=CLOSE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, one_device):
    """One saved step of AdamW on all parameters."""
    path = tmp_path_factory.mktemp("run")
    state, _, _ = one_device.go(one_device.first(), 3)
    with one_device.training(path) as training:
        training.save(state, metrics={"loss": 1.5})
    return path


def reopened(folder, declared=None, optimizer=None, mesh=None, trainable=None):
    return checkpoints.Training(
        folder, declared or toy.declare(), optimizer or toy.adamw(), mesh or zoo.make_mesh(), trainable=trainable
    )


def test_changes_are_refused_by_name_all_at_once_before_anything_is_read(folder, monkeypatch):
    def read(*_):
        raise AssertionError("a value was read")

    monkeypatch.setattr("shardzoo.checkpoints.training_restore.read_leaves", read)
    config = toy.ToyTrainingConfig(vocab=60)
    mesh = zoo.make_mesh(tensor=8)
    declared = astype(toy.declare(config=config), jnp.bfloat16)
    with reopened(folder, declared, optax.sgd(0.1), mesh, "blocks.*") as other, pytest.raises(InputError) as caught:
        other.restore()
    text = str(caught.value)
    for part in (
        "embed: stored with shape [64, 32] (vocab=64, embed=32), declared [60, 32]",
        "blocks.up: stored as float32, declared bfloat16: undo that, or pass changes=['dtype']",
        "vocab=60 does not divide by 8",
        "optimizer: its state was [EmptyState(), [ScaleByAdamState(count, mu, nu), EmptyState(), ScaleByScheduleState("
        "count)]], is now [EmptyState(), EmptyState()]: undo that, or pass changes=['optimizer']",
        "trainable: embed, head: trained before, not now: undo that, or pass changes=['trainable']",
    ):
        assert part in text, text
    with reopened(folder) as same, pytest.raises(InputError, match="changes='lr' is not one of dtype, optimizer"):
        same.restore(changes=["lr"])


def test_changes_are_made_on_request(folder, one_device):
    with one_device.training(folder) as training:
        before = arrays(training.restore())
    half = astype(toy.declare(), jnp.bfloat16)
    with reopened(folder, half) as training:
        state = training.restore(changes=["dtype"])
    for path, leaf in named(state.model).items():
        assert leaf.dtype == jnp.bfloat16
        np.testing.assert_array_equal(leaf, before[f"0.{path}"].astype(jnp.bfloat16))
    with reopened(folder, optimizer=optax.sgd(0.1, momentum=0.9)) as training:
        state = training.restore(changes=["optimizer"])
    assert not any(np.any(np.asarray(a)) for a in jax.tree.leaves(state.opt_state)) and int(state.step) == 3
    with reopened(folder, trainable=["blocks.*", "head"]) as training:
        state = training.restore(changes=["trainable"])
    assert state.opt_state[1][0].mu.embed is None
    np.testing.assert_array_equal(state.opt_state[1][0].mu.head, before["1.1.0.mu.head"])
    np.testing.assert_array_equal(state.opt_state[1][0].count, 3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep": 0}, "keep=0 is not a whole number above 0"),
        ({"keep": -2, "every": -3}, r"every=-3 is not a whole number above 0(.|\n)*keep=-2"),
        ({"every": True}, "every=True is not a whole number"),
        ({"seconds": math.nan}, "seconds=nan is not a number above 0"),
        ({"timeout": -1}, "timeout=-1 is not a number above 0"),
        ({"best": "-"}, "best='-' is not the name of a metric"),
    ],
)
def test_options_of_a_run_are_checked(tmp_path, options, words):
    with pytest.raises(InputError, match=words):
        checkpoints.Training(tmp_path / "run", toy.declare(), toy.adamw(), zoo.make_mesh(), **options)
    assert not (tmp_path / "run").exists()


def test_metrics_and_keys_are_checked(tmp_path, one_device):
    state = one_device.first()
    with one_device.training(tmp_path) as training:
        for metrics in ({"loss": "low"}, {"loss": np.ones(2)}, {"loss": None}):
            with pytest.raises(InputError, match=r"metrics: .* is not a number under a name of text"):
                training.save(state, metrics=metrics)
        with pytest.raises(InputError, match="key is a NoneType"):
            training.save(dataclasses.replace(state, key=None))
        assert training.save(state, metrics={"loss": jnp.bfloat16(1.5), "nan": math.nan, "n": np.ones((1,))})
    training = checkpoints.open(tmp_path).manifest.training
    assert training is not None and training["metrics"] == {"loss": 1.5, "nan": None, "n": 1.0}


def test_a_step_is_a_whole_number_and_its_folder_has_its_name(tmp_path, one_device):
    state = one_device.first()
    with one_device.training(tmp_path) as training:
        with pytest.raises(InputError, match="step=-1 is not a whole number from 0"):
            training.save(state, step=-1)
        assert training.save(state, step=4)
    for step in (1.0, "1", True):
        with pytest.raises(InputError, match="is not a whole number from 0"):
            checked_step(step)
    assert type(checked_step(np.int64(3))) is int
    with pytest.raises(InputError, match=r"save step 5: the run .* is closed"):
        training.save(state, step=5)
    with pytest.raises(InputError, match="is a checkpoint itself: give the folder of a run"):
        one_device.training(tmp_path / "4")
    shutil.copytree(tmp_path / "4", tmp_path / "6")
    with one_device.training(tmp_path) as training:
        with pytest.raises(InputError, match="holds step 4: its folder was renamed or copied"):
            training.restore(changes="dtype")
        assert int(training.restore(4, changes="dtype").step) == 4


def test_a_config_that_changed_where_no_shape_tells_is_refused_by_name(tmp_path):
    config = zoo.decoder.Config(vocab=7, embed=4, layers=1, heads=2, kv_heads=1, head_dim=2, mlp=3)
    other = dataclasses.replace(config, rope=dataclasses.replace(config.rope, theta=5.0), sliding_window=2)
    mesh, optimizer = zoo.make_mesh(), optax.sgd(0.1)
    declared = zoo.decoder.declare(config)
    model = place(declared, mesh, jax.tree.map(lambda p: np.zeros(p.shape, p.dtype), declared))
    state = checkpoints.TrainingState(
        model=model, opt_state=optimizer.init(model), step=jnp.int32(1), key=jax.random.key(0)
    )
    with checkpoints.Training(tmp_path / "run", declared, optimizer, mesh) as run:
        run.save(state)
    changed = zoo.decoder.declare(other)
    with checkpoints.Training(tmp_path / "run", changed, optimizer, mesh) as run:
        with pytest.raises(InputError) as caught:
            run.restore()
        for words in ("config: rope.theta=5.0 (was 10000.0): undo that", "sliding_window=2 (was None)", "['config']"):
            assert words in str(caught.value)
        went_on = run.restore(changes=["config"])
        assert went_on.model.config == other
        run.save(dataclasses.replace(went_on, step=jnp.int32(2)))
    assert checkpoints.open(tmp_path / "run").config == other
    with pytest.raises(InputError, match=r"not that of its source.*\n.*rope.theta=10000.0 \(was 5.0\)"):
        checkpoints.save(tmp_path / "again", model, declared, source=checkpoints.open(tmp_path / "run"))


def test_parameters_that_are_trained_anew_begin_with_first_moments(tmp_path):
    part = toy.Run({"data": 2, "tensor": 2}, True, trainable="blocks.*")
    state = part.first()
    state = dataclasses.replace(state, opt_state=jax.tree.map(lambda a: a + 1, state.opt_state))
    assert "embed" not in named(part.declared_state)
    with part.training(tmp_path) as training:
        training.save(state)
        same = training.restore()
    whole = toy.Run({"context": 2})
    with whole.training(tmp_path) as training:
        with pytest.raises(InputError, match="trainable: embed, head: trained now, not before"):
            training.restore()
        found = training.restore(changes=["trainable"])
    np.testing.assert_array_equal(found.opt_state[1][0].mu.blocks.up, same.opt_state[1][0].mu.blocks.up)
    np.testing.assert_array_equal(found.opt_state[1][0].mu.blocks.up, 1)
    assert not np.any(np.asarray(found.opt_state[1][0].nu.embed)) and np.all(np.isfinite(found.model.embed))


def test_a_step_is_a_checkpoint_like_any_other(folder, one_device):
    with one_device.training(folder) as training:
        before = arrays(training.restore())
    assert checkpoints.verify(folder / "3").level == "full"
    for path in (folder, folder / "3"):
        model = checkpoints.restore(path, zoo.make_mesh(data=2, tensor=2), verify=True)
        for name, leaf in named(model).items():
            np.testing.assert_array_equal(leaf, before[f"0.{name}"])
    part = checkpoints.restore(folder, zoo.make_mesh(), include=["blocks.*"])
    assert isinstance(part.embed, Param) and isinstance(part.blocks.up, jax.Array)


def test_any_flipped_bit_of_the_optimizer_is_found(folder, tmp_path, one_device):
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    file = next((copy / "3/opt_state/1.0.nu.blocks.up").rglob("0"))
    while file.is_dir():
        file = next(file.iterdir())
    data = bytearray(file.read_bytes())
    data[100] ^= 4
    file.write_bytes(data)
    with pytest.raises(InputError, match=r"opt_state/1\.0\.nu\.blocks\.up"):
        checkpoints.verify(copy / "3")
    with one_device.training(copy) as training, pytest.raises(InputError, match=r"opt_state/1\.0\.nu\.blocks\.up"):
        training.restore()


def test_any_flipped_bit_of_what_orbax_writes_is_found(folder, tmp_path):
    copy = tmp_path / "3"
    shutil.copytree(folder / "3", copy)
    names = [n for n in listing(copy) if n == MARKS_FILE or n.endswith(("_CHECKPOINT_METADATA", "success.txt"))]
    assert len(names) >= 5
    for name in names:
        data = (copy / name).read_bytes()
        for at in range(0, len(data), max(1, len(data) // 40)):
            flipped = bytearray(data)
            flipped[at] ^= 1 << at % 8
            (copy / name).write_bytes(flipped)
            with pytest.raises(InputError):
                checkpoints.verify(copy, "quick")
        (copy / name).write_bytes(data)
    about = (copy / "_CHECKPOINT_METADATA").read_text()
    (copy / "_CHECKPOINT_METADATA").write_text(about.replace("init_time", "initOtime"))
    for _ in range(2):  # and the folder is free again
        with pytest.raises(InputError, match="holds a step that Orbax cannot read"):
            reopened(tmp_path)
    (copy / "_CHECKPOINT_METADATA").write_text(about)
    (copy / "commit_success.txt").unlink()
    with pytest.raises(InputError, match=r"commit_success.txt: missing"):
        checkpoints.verify(copy, "quick")


def test_plain_orbax_reads_a_step(folder, one_device):
    from orbax.checkpoint import v1 as ocp

    with one_device.training(folder) as training:
        state = training.restore()
        params = ocp.load(folder / "3", checkpointable_name="params")
        moments = ocp.load(folder / "3", checkpointable_name="opt_state")
        with ocp.training.Checkpointer(folder) as checkpointer:
            assert [c.step for c in checkpointer.checkpoints] == [3]
    np.testing.assert_array_equal(params["blocks"]["up"], state.model.blocks.up)
    np.testing.assert_array_equal(moments["1"]["0"]["mu"]["head"], state.opt_state[1][0].mu.head)


def test_sigterm_saves_and_stops(tmp_path, one_device):
    state = one_device.first()
    with one_device.training(tmp_path, every=1000) as training:
        assert not training.save(state, step=1) and not training.stopping
        os.kill(os.getpid(), signal.SIGTERM)
        begin = time.monotonic()
        assert training.save(state, step=2) and training.stopping
        assert training.steps == [2] and time.monotonic() - begin < 10
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_failed_save_is_told_by_the_next_call(tmp_path, one_device, monkeypatch):
    """And by nothing else: Orbax's threads would log a trace each."""
    from shardzoo.checkpoints.store import LeafWriter

    logged, log, listener = [], logging.getLogger("absl"), logging.Handler()
    listener.emit = logged.append
    monkeypatch.setattr(log, "handlers", [*log.handlers, listener])

    def full(*_):
        raise OSError(28, os.strerror(28))

    state = one_device.first()
    with one_device.training(tmp_path) as training:
        with monkeypatch.context() as patch:
            patch.setattr(LeafWriter, "write", full)
            training.save(state, step=1)
            with pytest.raises(InputError, match="no space left"):
                training.wait()
        assert training.steps == [] and os.listdir(tmp_path) == []
        assert not [record for record in logged if record.exc_info]
        assert training.save(state, step=1)
    assert training.steps == [1]


def test_states_that_are_not_of_the_declaration_are_refused(tmp_path, one_device):
    state = one_device.first()
    other = dataclasses.replace(state, opt_state=optax.sgd(0.1).init(state.model))
    lacks = r"1\.0\.mu\.embed: declared, but the optimizer's state has none"
    with one_device.training(tmp_path) as training, pytest.raises(InputError, match=lacks):
        training.save(other)
    with pytest.raises(InputError, match="every=0"):
        one_device.training(tmp_path, every=0)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adafactor(1e-3),
        optax.MultiSteps(optax.adam(1e-3), 4),
        optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
        optax.partition({"a": optax.adam(1e-3), "b": optax.sgd(1e-2)}, lambda p: jax.tree.map(lambda _: "a", p)),
        optax.sgd(1e-2),
    ],
    ids=["adafactor", "MultiSteps", "inject_hyperparams", "partition", "sgd"],
)
def test_states_of_other_optimizers(tmp_path, optimizer):
    mesh = zoo.make_mesh(data=2, tensor=2)
    declared = toy.declare({"data": 2}, True)
    model = toy.place(declared, mesh, jax.tree.map(lambda p: np.ones(p.shape, np.float32), declared))
    opt_state = optimizer_state.init(optimizer, model, declared, mesh)
    state = checkpoints.TrainingState(model=model, opt_state=opt_state, step=1, key=jax.random.key(0))
    with checkpoints.Training(tmp_path, declared, optimizer, mesh, sync=False) as training:
        training.save(state)
        found = training.restore()
    assert jax.tree.structure(found) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(found.opt_state), jax.tree.leaves(opt_state), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


def test_the_manifest_says_what_the_run_was(folder):
    manifest = json.loads((folder / "3/manifest/metadata").read_text())
    training = manifest["training"]
    assert training["step"] == 3 and training["mesh"] == "one device" and training["metrics"] == {"loss": 1.5}
    assert training["data"] == {"examples": 24} and training["frozen"] == [] and training["processes"] == 1
    assert manifest["family"] == "toy-training" and manifest["config"]["embed"] == 32
