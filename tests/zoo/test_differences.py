"""What adapters add to biases, norms, convolutions and tables: every leaf of every family, on meshes, saved, merged."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from lora_files import made
from mesh_parity import harsh
from tiny_families import SIZES, TINY

from shardzoo import checkpoints
from shardzoo.errors import InputError
from shardzoo.zoo import adapters, decoder, layout, losses, training
from shardzoo.zoo.adapters import Adapter
from shardzoo.zoo.families import MODULES, find_family
from shardzoo.zoo.generate import complete
from shardzoo.zoo.linears import linear_layers, missing_biases
from shardzoo.zoo.mesh import Degrees, make_mesh

TOLERANCE = 5e-5
CONFIG = dataclasses.replace(TINY["decoder"], layers=2)
KV_HEADS = {"decoder": 4, "qwen3-5": 4}


def drawn(params, seed=3):
    rng = np.random.default_rng(seed)
    return {path: (0.3 * rng.normal(size=p.shape)).astype(np.float32) for path, p in params.items()}


def other_leaves(declared):
    weights = linear_layers(declared)
    return {path: p for path, p in layout.named(declared).items() if path not in weights}


def summed(declared, values, differences, strength):
    host = layout.named(values)
    return layout.fill(declared, {p: x + np.float32(strength) * differences.get(p, 0) for p, x in host.items()})


def attached(declared, degrees, loaded, *, family="decoder", values=None, running=None):
    mesh = make_mesh(**degrees, kv_heads=KV_HEADS.get(family))
    running = declared if running is None else running
    live = layout.place(running, mesh, harsh(declared) if values is None else values)
    return mesh, *adapters.attach(running, live, mesh, loaded)


def inputs(abstract):
    rng = np.random.default_rng(1)
    return [
        jnp.asarray(rng.integers(1, 40, x.shape) if x.dtype == jnp.int32 else rng.uniform(0, 1, x.shape), x.dtype)
        for x in abstract
    ]


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(MODULES))
def test_every_leaf_of_every_family(family):
    """As merged by hand on one device; a bias that a layer has not by itself, each alone, changes the result."""
    declared = find_family(family).declare(TINY[family])
    values, missing = harsh(declared), missing_biases(declared)
    added, biases = drawn(other_leaves(declared)), drawn(missing)
    loaded = [Adapter(name="all", strength=0.7, factors={}, differences=added)]
    loaded += [
        Adapter(name=f"b{i}", strength=0.0, factors={}, differences={p: x}) for i, (p, x) in enumerate(biases.items())
    ]
    mesh, new, model = attached(declared, dict(tensor=2, context=2), loaded, family=family)
    f, abstract = find_family(family).trace(new, mesh, SIZES)
    run, given = jax.jit(f), inputs(abstract)
    got = [np.asarray(x, np.float64) for x in jax.tree.leaves(run(model, *given))]
    one = make_mesh()
    f, _ = find_family(family).trace(declared, one, SIZES)
    wanted = jax.jit(f)(layout.place(declared, one, summed(declared, values, added, 0.7)), *given)
    for x, want in zip(got, jax.tree.leaves(wanted), strict=True):
        assert np.abs(x - want).max() <= TOLERANCE * np.abs(want).max()
    for i, path in enumerate(missing):
        there = jax.tree.leaves(run(adapters.set_strengths(model, {f"b{i}": 1.0}), *given))
        assert any(np.abs(x - y).max() > 1e-4 * np.abs(y).max() for x, y in zip(there, got, strict=True)), path


TOKENS = np.random.default_rng(0).integers(1, 60, (2, 9))


def logits(declared, mesh, model):
    return np.asarray(jax.jit(decoder.forward(declared, mesh))(model, TOKENS), np.float32)


@pytest.fixture(scope="module")
def both():
    """The declaration, differences of all its leaves, and the logits with 0.5 of them on one device."""
    declared = decoder.declare(CONFIG)
    added = drawn(other_leaves(declared))
    mesh = make_mesh()
    return (
        declared,
        added,
        logits(declared, mesh, layout.place(declared, mesh, summed(declared, harsh(declared), added, 0.5))),
    )


def style(added, **changes):
    return Adapter(**{"name": "style", "strength": 0.5, "factors": {}, "differences": added, **changes})


def test_saved_and_restored_on_another_mesh_split_at_rest_and_on_the_host(both, tmp_path):
    declared, added, want = both
    _, new, model = attached(declared, dict(tensor=2), [style(added)])
    checkpoints.save(tmp_path / "ckpt", model, new, sync=False)
    came = checkpoints.open(tmp_path / "ckpt")
    assert came.declared == new and came.manifest.header.detail["adapters"] == ["style"]
    degrees = Degrees(context=2, tensor=2)
    rest = layout.keep_on_host(layout.split_at_rest(came.declared, "context", degrees, smallest=8), smallest=16)
    mesh = make_mesh(context=2, tensor=2, kv_heads=4)
    restored = checkpoints.restore(came, mesh, declared=rest)
    assert np.abs(logits(rest, mesh, restored) - want).max() <= TOLERANCE * np.abs(want).max()
    merged = adapters.merge(rest, restored)
    assert jax.tree.structure(merged[0]) == jax.tree.structure(declared) and not adapters.names(merged[1])
    whole = layout.named(summed(declared, harsh(declared), added, 0.5))
    for path, leaf in layout.named(merged[1]).items():
        assert leaf.sharding == layout.named(merged[0])[path].sharding(mesh)
        np.testing.assert_allclose(leaf, whole[path], rtol=1e-6, atol=1e-7, err_msg=path)


def test_values_in_place_of_the_models(both):
    """Whatever the strength was before, and where the file has none the model's stay."""
    declared, _, _ = both
    path, rng = "blocks.attn_norm.weight", np.random.default_rng(4)
    wanted = rng.normal(size=layout.named(declared)[path].shape).astype(np.float32)
    wanted[1] = np.nan
    _, new, model = attached(declared, {}, [style({}, strength=1.0, instead={path: wanted})])
    host = layout.named(harsh(declared))[path]
    merged = layout.named(adapters.merge(new, model)[1])[path]
    np.testing.assert_allclose(merged, np.where(np.isnan(wanted), host, wanted), rtol=1e-6, atol=1e-7)
    off = layout.named(adapters.merge(new, adapters.set_strengths(model, {"style": 0.0}))[1])[path]
    np.testing.assert_array_equal(off, host)
    bare = adapters.detach(new, model)
    assert bare[0] == declared and layout.named(bare[1]).keys() == layout.named(declared).keys()


@pytest.mark.slow
def test_generation_step_by_step(both):
    declared, added, _ = both
    prompts = [[3, 5, 7], [9, 1, 2, 8, 8]]
    mesh, new, model = attached(declared, dict(tensor=2), [style(added)])
    one = make_mesh()
    whole = layout.place(declared, one, summed(declared, harsh(declared), added, 0.5))
    want = complete(declared, one, whole, prompts, max_new_tokens=6)
    assert complete(new, mesh, model, prompts, max_new_tokens=6) == want
    assert complete(declared, one, layout.place(declared, one, harsh(declared)), prompts, max_new_tokens=6) != want


def test_gradients_of_differences_when_asked_for(both):
    """On a mesh, by autodiff and by 1F1B: those of the leaves that they are added to, times the strength."""
    declared, added, _ = both
    loaded = [style(added), dataclasses.replace(made(declared, "other", 2, only="attn.q"), strength=0.3)]
    mesh, new, model = attached(declared, dict(pipe=2, tensor=2), loaded)
    values = {f"{path}.diff.style.value" for path in added}
    assert {p for p, on in layout.named(adapters.trainable(new, differences=True)).items() if on} == {
        *values, "blocks.attn.q.weight.lora.other.a", "blocks.attn.q.weight.lora.other.b"
    }  # fmt: skip
    assert not any(layout.named(adapters.trainable(model, "style")).values())
    with pytest.raises(InputError, match="'none': there is no such adapter, but other, style"):
        adapters.trainable(model, ["none"])
    chosen, rest = eqx.partition(model, lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating))
    f, given = decoder.forward(new, mesh), losses.next_tokens(jnp.asarray(TOKENS))
    loss = jax.jit(jax.grad(lambda chosen: losses.cross_entropy(f(eqx.combine(chosen, rest), TOKENS), *given)))
    want = layout.named(loss(chosen))
    for path in added:
        np.testing.assert_allclose(
            want[f"{path}.diff.style.value"], 0.5 * want[f"{path}.base"], rtol=1e-4, atol=1e-7, err_msg=path
        )
    step = jax.jit(decoder.loss_and_grad(new, mesh, trainable="*.diff.*.value", microbatches=2))
    got = layout.named(step(model, TOKENS, *given)[1])
    assert got.keys() == values
    for path, grad in got.items():
        np.testing.assert_allclose(grad, want[path], rtol=1e-4, atol=1e-6, err_msg=path)
    training.make_step(lambda model: 0.0, optax.sgd(1.0), new, mesh, trainable="*.diff.*.value")
    with pytest.raises(InputError, match=r"norm\.weight\.diff\.style\.strength: float32 has no gradient"):
        training.make_step(lambda model: 0.0, optax.sgd(1.0), new, mesh, trainable="norm.weight.diff.*")


def test_what_does_not_fit(both):
    declared, added, _ = both
    bias = "blocks.attn.out.bias"
    assert bias in missing_biases(declared)
    wrong = {"norm.weight": np.zeros(3, np.float32), "nowhere.weight": np.zeros(3), "blocks.attn.q.weight": np.zeros(3)}
    with pytest.raises(InputError) as caught:
        adapters.declare(
            declared, [style(wrong), style({**added}, name="two", instead={"norm.weight": added["norm.weight"]})]
        )
    for part in (
        "style: norm.weight: the difference has shape (3,), expected (32,)",
        "style: nowhere.weight is no leaf of this model that differences are added to",
        "style: blocks.attn.q.weight is no leaf",
        "two: norm.weight has a difference and a value in its place",
    ):
        assert part in str(caught.value)
    _, new, model = attached(declared, {}, [style(drawn({bias: missing_biases(declared)[bias]}))])
    with pytest.raises(InputError, match=r"stay apart.*blocks.attn.out.bias: there is no such bias in this model"):
        adapters.merge(new, model)
