"""The T5 family on meshes: the same numbers as on one device, the collectives it promises, its options."""

import dataclasses
import functools
import math
import re

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_parity import assert_close, harsh

from shardzoo.cli.topology import topology_devices
from shardzoo.errors import InputError
from shardzoo.zoo import layout, t5
from shardzoo.zoo.families import config_from_json, config_to_json, find_preset
from shardzoo.zoo.mesh import Degrees, make_mesh
from shardzoo.zoo.t5 import Config

B, S = 3, 19
UMT5 = Config(vocab=48, embed=32, layers=2, heads=8, head_dim=6, mlp=48, buckets=8, max_distance=11)
T5 = dataclasses.replace(UMT5, shared_bias=True)
CONFIGS = {"umt5": UMT5, "t5": T5}
rng = np.random.default_rng(0)
TOKENS = rng.integers(0, 48, (B, S))
LENGTHS = np.array([19, 7, 12])
MASK = rng.random((B, S)) < 0.6
COTANGENT = rng.normal(size=(B, S, 32)).astype(np.float32)
HOW = {"lengths": {"lengths": LENGTHS}, "mask": {"mask": MASK}, "all": {}}


def run(config, degrees, by, at_rest=None, **options):
    """The output where it means something, and the gradient of a weighted sum of it."""
    declared = t5.declare(config)
    values = harsh(declared)
    if at_rest:
        declared = layout.split_at_rest(declared, at_rest, degrees, smallest=16)
        assert any(p.rest for p in layout.named(declared.blocks).values())
    mesh = make_mesh(**{f.name: getattr(degrees, f.name) for f in dataclasses.fields(degrees)})
    f = t5.forward(declared, mesh, **options)
    seen = np.arange(S) < LENGTHS[:, None] if by == "lengths" else np.ones((B, S), bool)

    def total(model):
        out = f(model, TOKENS, **HOW[by])[:, :S] * seen[..., None]
        return jnp.sum(out * COTANGENT), out

    model = layout.place(declared, mesh, values)
    (_, out), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(model)
    return jax.tree.map(np.asarray, (out, layout.named(grads)))


@functools.cache
def one_device(name, by):
    return run(CONFIGS[name], Degrees(), by)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "name, by, degrees, options",
    [
        ("umt5", "lengths", dict(tensor=2), dict()),
        ("umt5", "mask", dict(tensor=2, context=2), dict(residual="seq", at_rest="context")),
        ("umt5", "mask", dict(context=3), dict()),
        ("t5", "all", dict(data=2, context=2, tensor=2), dict(at_rest="data")),
        ("t5", "all", dict(context=6), dict(remat=True)),  # two ways by heads, three by rows
        ("t5", "mask", dict(context=4, tensor=2), dict(residual="seq")),
        pytest.param("umt5", "all", dict(tensor=4, context=2), dict(residual="seq", remat=True), marks=SLOW),
        pytest.param("umt5", "mask", dict(context=8), dict(at_rest="context"), marks=SLOW),
        pytest.param("t5", "mask", dict(tensor=8), dict(remat=True), marks=SLOW),
        pytest.param("t5", "lengths", dict(context=3, data=2), dict(), marks=SLOW),
        pytest.param("t5", "lengths", dict(context=4), dict(), marks=SLOW),
    ],
    ids=str,
)
def test_mesh_parity(name, by, degrees, options):
    """Forward and gradient on a mesh, at 1e-5 of one device's."""
    assert_close(run(CONFIGS[name], Degrees(**degrees), by, **options), one_device(name, by))


def test_context_wider_than_the_heads():
    """Keys are gathered; the bias is that of each device's own queries."""
    few = dataclasses.replace(UMT5, heads=2, head_dim=24)
    assert_close(run(few, Degrees(context=4, tensor=2), "mask"), run(few, Degrees(), "mask"))


@pytest.mark.parametrize(
    "by, degrees, residual",
    [
        ("lengths", dict(tensor=2, context=2), "seq"),
        ("mask", dict(tensor=2, context=2), "seq"),
        ("lengths", dict(context=3, data=2), "whole"),
    ],
    ids=str,
)
def test_zeros_at_padding_on_a_mesh(by, degrees, residual):
    declared = t5.declare(UMT5)
    seen = np.pad(MASK if by == "mask" else np.arange(S) < LENGTHS[:, None], ((0, 0), (0, 6)))
    got = []
    for mesh, how in ((make_mesh(), "whole"), (make_mesh(**degrees), residual)):
        f = t5.forward(declared, mesh, zero_padded_to=25, residual=how)
        got.append(np.asarray(jax.jit(f)(layout.place(declared, mesh, harsh(declared)), TOKENS, **HOW[by])))
    assert got[0].shape == (B, 25, 32) and (got[0][~seen] == 0).all() and (got[0][seen] != 0).any(-1).all()
    assert (got[1][~seen] == 0).all()
    assert_close(got[1], got[0])


def collectives(config, degrees, with_mask=False, **options):
    """How often each collective over more than one device stands in the compiled forward pass."""
    declared, mesh = t5.declare(config), make_mesh(**degrees)
    f = jax.jit(t5.forward(declared, mesh, **options))
    tokens = jax.ShapeDtypeStruct((4, 24), jnp.int32)  # divides by every mesh below
    more = {"mask": jax.ShapeDtypeStruct((4, 24), jnp.bool_)} if with_mask else {}
    return hlo.collectives(f.lower(layout.abstract(declared, mesh), tokens, **more).compile())


SEQ = {"all-gather": 2, "reduce-scatter": 2}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(
    "degrees, options, block, ends",
    [
        (dict(tensor=2), {}, {"all-reduce": 2}, {"all-reduce": 1}),
        (dict(tensor=2), dict(residual="seq"), SEQ, {"reduce-scatter": 1}),
        (dict(context=4), {}, {"all-to-all": 3}, {}),
        (dict(context=4), dict(with_mask=True), {"all-to-all": 3, "all-gather": 1}, {}),
        (dict(context=3), {}, {"all-gather": 1}, {}),
        (dict(context=2, tensor=2), {}, {"all-to-all": 3, "all-reduce": 2}, {"all-reduce": 1}),
        (dict(data=4), {}, {}, {}),
    ],
    ids=str,
)
def test_collectives(config, degrees, options, block, ends):
    """What the docstrings of `Block` and `attention` say, once each (the scan's body), and that of the embedding."""
    want = {k: block.get(k, 0) + ends.get(k, 0) for k in {*block, *ends}}
    assert collectives(config, degrees, **options) == want


@pytest.mark.parametrize("degrees", [dict(context=4), dict(context=3)], ids=str)
def test_a_device_spreads_the_bias_of_its_own_heads_or_queries(degrees):
    """No array of all heads x all queries x all keys: of 8 heads, 96 queries and 96 keys, each device has its share."""
    declared, mesh = t5.declare(UMT5), make_mesh(**degrees)
    tokens = jax.ShapeDtypeStruct((1, 96), jnp.int32)
    text = jax.jit(t5.forward(declared, mesh)).lower(layout.abstract(declared, mesh), tokens).compile().as_text()
    sizes = [math.prod(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", text)]
    assert max(sizes) <= 2.2 * 8 * 96 * 96 / degrees["context"]


@pytest.mark.parametrize("degrees", [dict(context=2, tensor=2), pytest.param(dict(tensor=4), marks=SLOW)], ids=str)
def test_a_tpu_runs_the_kernel_with_the_bias(degrees):
    """Compiled for four TPU chips, with the blocks in host memory."""
    config = Config(vocab=512, embed=512, layers=3, heads=8, head_dim=64, mlp=1024)
    declared = layout.keep_on_host(t5.declare(config, jnp.bfloat16), smallest=16)
    mesh = make_mesh(**degrees, devices=topology_devices("v5e:2x2"))
    f = jax.jit(t5.forward(declared, mesh, zero_padded_to=512))
    lengths = jax.ShapeDtypeStruct((1,), jnp.int32)
    tokens = jax.ShapeDtypeStruct((1, 500), jnp.int32)
    compiled = f.lower(layout.abstract(declared, mesh), tokens, lengths=lengths).compile()
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') >= 1


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_weights_read_in_place_give_the_same(dtype):
    declared, mesh = t5.declare(UMT5, dtype), make_mesh(context=2)
    model = layout.place(declared, mesh, jax.tree.map(lambda v: v.astype(dtype), harsh(declared)))
    got, want = (
        np.asarray(jax.jit(t5.forward(declared, mesh, in_place=x))(model, TOKENS), np.float32) for x in (True, False)
    )
    assert np.abs(got - want).max() <= (1e-6 if dtype == np.float32 else 2e-2) * np.abs(want).max()


def test_padding_never_reaches_a_token():
    declared, mesh = t5.declare(UMT5), make_mesh(context=2, tensor=2)
    f, model = jax.jit(t5.forward(declared, mesh)), layout.place(declared, mesh, harsh(declared))
    other = np.where(MASK, TOKENS, (TOKENS + 1) % 48)
    one, two = (np.asarray(f(model, tokens, mask=MASK)) for tokens in (TOKENS, other))
    np.testing.assert_array_equal(one[MASK], two[MASK])
    assert (one[~MASK] != two[~MASK]).any()


def test_a_row_without_tokens_is_finite():
    declared, mesh = t5.declare(T5), make_mesh()
    f, model = jax.jit(t5.forward(declared, mesh)), layout.place(declared, mesh, harsh(declared))
    assert np.isfinite(np.asarray(f(model, TOKENS, mask=np.zeros((B, S), bool)))).all()


def test_refusals():
    declared, mesh = t5.declare(UMT5), make_mesh()
    with pytest.raises(InputError, match="pipe=2"):
        t5.forward(declared, make_mesh(pipe=2))
    with pytest.raises(InputError, match="heads=8"):
        t5.forward(declared, make_mesh(tensor=3))
    f, model = t5.forward(declared, mesh, zero_padded_to=12), layout.place(declared, mesh, harsh(declared))
    with pytest.raises(InputError, match=r"lengths and mask(.|\n)*seq=19 is more than zero_padded_to=12"):
        f(model, TOKENS, lengths=LENGTHS, mask=MASK)
    for none in (TOKENS[:0], TOKENS[:, :0]):
        with pytest.raises(InputError, match="are none: give at least one"):
            f(model, none)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(layers=0), "layers=0"),
        (dict(heads=-1, mlp=0), r"heads=-1(.|\n)*mlp=0"),
        (dict(buckets=3), "buckets=3 is not at least 4"),
        (dict(buckets=32, max_distance=8), "max_distance=8 is not above the 8"),
    ],
)
def test_config_refuses(change, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(UMT5, **change)


def test_presets_have_their_published_sizes():
    published = {"umt5-xxl": 5_680_910_336, "t5-v1.1-xxl": 4_762_310_656}
    assert t5.PRESETS.keys() == published.keys()
    for name, count in published.items():
        family, config = find_preset(f"t5/{name}")
        assert sum(math.prod(p.shape) for p in layout.named(family.declare(config)).values()) == count
        assert config_from_json(Config, config_to_json(config)) == config
