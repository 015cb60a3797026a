"""The declaration: its readers agree, and a mesh that does not fit is refused with everything that stops it."""

import dataclasses
import itertools
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from jax import P
from jax.sharding import AbstractMesh, AxisType
from lora_files import made
from mesh_parity import harsh
from tiny_families import TINY

from shardzoo.errors import InputError
from shardzoo.zoo import adapters, decoder, layout
from shardzoo.zoo.layout import Param, audit, misfits, named, split_at_rest, stack, with_kv
from shardzoo.zoo.mesh import AXES, TP, Degrees, make_mesh


class Block(eqx.Module):
    q: Any
    kv: Any
    up: Any


class Model(eqx.Module):
    embed: Any
    blocks: Block
    head: Any = None


def declare(heads=9, kv_heads=3, mlp=1536, vocab=49152, embed=64):
    block = Block(
        Param("heads head_dim embed", (heads, 16, embed), {"heads": TP}),
        Param("block kv_heads head_dim embed", (2, kv_heads, 16, embed), {"kv_heads": "kv"}),
        Param("block mlp embed", (2, mlp, embed), {"mlp": TP}),
    )
    return Model(Param("vocab embed", (vocab, embed), {"vocab": TP}), stack(block, 3))


def test_readers_agree():
    decl, mesh = declare(), make_mesh(data=2, tensor=3)
    assert list(named(decl)) == ["embed", "blocks.q", "blocks.kv", "blocks.up"]
    assert layout.specs(decl).blocks.kv == P(None, None, "kv", None, None)
    target = layout.abstract(decl, mesh, "bfloat16")
    assert target.blocks.q.shape == (3, 9, 16, 64) and target.blocks.q.dtype == "bfloat16"
    assert target.blocks.q.sharding.shard_shape(target.blocks.q.shape) == (3, 3, 16, 64)
    live = layout.fill(decl, {path: np.zeros(p.shape) for path, p in named(decl).items()})
    assert isinstance(live, Model) and live.blocks.up.shape == (3, 2, 1536, 64)
    assert list(named(live)) == list(named(decl))


def test_abstract_mesh_needs_no_device():
    mesh = AbstractMesh((4, 1, 16, 3, 1), AXES, axis_types=(AxisType.Auto,) * 5)
    assert layout.abstract(declare(), mesh).blocks.q.sharding.shard_shape((3, 9, 16, 64)) == (3, 3, 16, 64)
    audit(declare(), mesh)


def test_fill_names_every_difference():
    decl = declare()
    values = {path: np.zeros(p.shape) for path, p in named(decl).items()}
    values["blocks.k"] = values.pop("blocks.kv")
    with pytest.raises(InputError, match=r"(?s)blocks\.kv: declared.*blocks\.k: not a parameter"):
        layout.fill(decl, values)


def test_place_says_of_a_mesh_that_does_not_fit_what_audit_says():
    decl = declare()
    values = layout.fill(decl, {path: np.zeros(p.shape) for path, p in named(decl).items()})
    with pytest.raises(InputError, match="does not fit this model"):
        layout.place(decl, make_mesh(tensor=7), values)


STOPS = {
    1: [],
    2: ["heads=9", "kv_heads=3"],
    3: [],
    4: ["heads=9", "kv_heads=3"],
    6: ["heads=9"],
    9: ["mlp=1536", "vocab=49152"],
}


@pytest.mark.parametrize("tensor, stops", STOPS.items())
def test_audit_names_every_dim_that_stops_a_degree(tensor, stops):
    decl, degrees = declare(), Degrees(tensor=tensor)
    lines = misfits(decl, with_kv(decl, degrees))
    assert len(lines) == len(stops) and all(any(f" {s} does not divide" in line for line in lines) for s in stops)
    if not stops:
        return audit(decl, degrees)
    with pytest.raises(InputError, match=r"tensor degrees that fit: 1, 3;") as error:
        audit(decl, degrees)
    assert all(line in str(error.value) for line in lines)


def test_pipe_that_splits_nothing_is_refused():
    with pytest.raises(InputError, match=r"pipe=2 splits nothing of this model: use pipe=1"):
        audit(declare(), Degrees(pipe=2))
    audit({"blocks": stack(Param("embed", (4,)), 4, "pipe")}, Degrees(pipe=2))
    with pytest.raises(InputError, match=r"layer=3 does not divide by 2 \(pipe=2\)"):
        audit({"blocks": stack(Param("embed", (4,)), 3, "pipe")}, Degrees(pipe=2))


def test_audit_suggests_meshes_of_the_same_size():
    with pytest.raises(InputError, match=r"same number of devices: \(context=2,tensor=3\) or \(context=6\)"):
        audit(declare(), Degrees(tensor=6))
    with pytest.raises(InputError, match=r"same number of devices: \(data=2,context=2\)"):
        audit(declare(), Degrees(data=2, tensor=2))


def test_audit_of_a_degree_beyond_all_reason_answers_at_once():
    tensors, meshes = layout.fitting(declare(), Degrees(tensor=10**9))
    assert max(tensors) <= 256 and Degrees(context=10**9) in meshes


def test_audit_of_a_mesh_made_without_kv_heads():
    """tensor=6 as kv=6 cannot hold 3 KV heads; made with kv_heads=3 it can."""
    decl = declare(heads=12)
    with pytest.raises(InputError, match=r"make the mesh with kv_heads=3"):
        audit(decl, make_mesh(tensor=6))
    audit(decl, make_mesh(tensor=6, kv_heads=3))
    with pytest.raises(InputError, match=r"kv_heads=4 over kv=2 x rep=2 .* kv_heads=4"):
        audit(declare(heads=8, kv_heads=4), make_mesh(tensor=4, kv_heads=2))


def test_audit_says_fits_exactly_when_shards_exist():
    """Over many sizes: no misfit, if and only if JAX accepts the shardings and KV heads pair with query heads."""
    for heads, kv, mlp, tensor in itertools.product((4, 6, 9), (1, 2, 3, 6), (8, 12), (1, 2, 3, 4, 6)):
        if heads % kv:
            continue
        decl = declare(heads, kv, mlp, vocab=24)
        degrees = with_kv(decl, Degrees(tensor=tensor))
        mesh = AbstractMesh(tuple(degrees.sizes.values()), AXES, axis_types=(AxisType.Auto,) * 5)

        def shards(target=None, mesh=mesh, decl=decl):
            for leaf in jax.tree.leaves(layout.abstract(decl, mesh)):
                leaf.sharding.shard_shape(leaf.shape)

        whole = degrees.sizes["rep"] == 1 or degrees.sizes["kv"] == kv
        try:
            shards()
            fits = whole
        except ValueError:
            fits = False
        assert (not misfits(decl, degrees)) == fits, (heads, kv, mlp, tensor)


def test_split_at_rest_takes_a_free_dim_that_divides():
    decl = declare(embed=66)
    rest = split_at_rest(decl, "data", Degrees(data=4, tensor=3), smallest=100)
    assert rest.blocks.q.spec == P(None, TP, "data", None)  # embed=66 does not divide by 4, head_dim does
    assert rest.embed.spec == P((*TP, "data"), None)  # only the split dim is left: 49152 / 3 / 4
    assert rest.blocks.kv.dtype == decl.blocks.kv.dtype
    assert split_at_rest(decl, "data", Degrees(tensor=3)) == decl
    assert not any(p.rest for p in jax.tree.leaves(split_at_rest(decl, "data", Degrees(data=4), smallest=10**9)))


def test_split_at_rest_over_two_axes_takes_a_dim_for_each():
    degrees = Degrees(data=2, context=2)
    both = split_at_rest(split_at_rest(declare(), "data", degrees, smallest=100), "context", degrees, smallest=100)
    assert dict(both.blocks.q.rest) == {"embed": "data", "head_dim": "context"}
    assert all(sorted(p.rest.values()) in ([], ["data"], ["context", "data"]) for p in named(both).values())


def test_param_refuses_dims_that_do_not_name_its_shape():
    for dims, shape, split in [("a b", (1,), {}), ("a a", (1, 1), {}), ("a", (1,), {"b": TP})]:
        with pytest.raises(ValueError, match="Param"):
            Param(dims, shape, split)


def test_astype_leaves_integers_alone():
    decl = dataclasses.replace(declare(), head=Param("vocab", (4,), dtype=np.dtype("int64")))
    cast = layout.astype(decl, "bfloat16")
    assert cast.head.dtype == "int64" and cast.embed.dtype == "bfloat16" and cast.embed.nbytes == 49152 * 64 * 2


def test_forward_mode_outside_of_jit():
    """It works where there is no rule for the backward pass alone, and is refused there in JAX's words."""
    mesh, x = make_mesh(tensor=2), np.array([2.0, 3.0], np.float32)

    def total(change):
        def one_device(x, w):
            x, (w,) = change(x, [w])
            return x * w

        return layout.sharded(one_device, mesh, (P("kv"), P("kv")), P("kv"))

    np.testing.assert_array_equal(jax.jvp(total(lambda x, w: (x, w)), (x, x), (x, 0 * x))[1], x * x)
    with pytest.raises(TypeError, match="can't apply forward-mode"):
        jax.jvp(total(layout.in_turn), (x, x), (x, x))


def test_a_model_of_another_form_than_declared_is_refused():
    declared, mesh = decoder.declare(dataclasses.replace(TINY["decoder"], layers=2)), make_mesh()
    live, tokens = layout.place(declared, mesh, harsh(declared)), np.ones((1, 3), int)
    new, model = adapters.attach(declared, live, mesh, [made(declared, "style", 2, only="attn.q")])
    with pytest.raises(InputError, match=r"q\.weight\.base, .* is not declared: take declaration and model that"):
        decoder.forward(declared, mesh)(model, tokens)
    with pytest.raises(InputError, match=r"lora\.style\.b and 2 more is declared, and the model has none"):
        decoder.forward(new, mesh)(live, tokens)
    with pytest.raises(InputError, match="place: vocab embed is of int64, declared float32: cast it"):
        layout.place(declared, mesh, jax.tree.map(lambda x: np.asarray(x).astype(int), harsh(declared)))


def test_inside_of_a_shard_map_over_another_axis():
    """A model's forward pass there is that of its rows; over an axis that models split it is refused."""
    shape = (2, 1, 1, 1, 2, 1)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(shape), ("mine", *AXES))
    declared = decoder.declare(dataclasses.replace(TINY["decoder"], layers=2))
    model, f = layout.place(declared, mesh, harsh(declared)), decoder.forward(declared, mesh)
    tokens = np.random.default_rng(0).integers(0, 64, (2, 7))

    def inside(specs, rows, **over):
        return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(specs, rows), out_specs=rows, **over))(model, tokens)

    wanted = jax.jit(f)(model, tokens)
    got = inside(P(), P("mine"), axis_names={"mine"})
    assert np.abs(got - wanted).max() <= 1e-5 * np.abs(wanted).max()
    with pytest.raises(InputError, match=r"in one over data, pipe, context, kv, rep, which models split by themselves"):
        inside(layout.specs(declared), P("data"))
