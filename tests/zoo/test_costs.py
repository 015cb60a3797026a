"""Costs read off traced programs: by hand for small ones, and against the compiled text for every family."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from tiny_families import SIZES, TINY

from shardzoo.errors import InputError
from shardzoo.zoo import decoder, layout
from shardzoo.zoo.costs import Collective, costs_of
from shardzoo.zoo.families import MODULES, find_family
from shardzoo.zoo.mesh import TP, make_mesh


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def costs(body, mesh, *arguments, in_specs, out_specs):
    mapped = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    return costs_of(mapped, mesh, *arguments)


def test_a_row_layer_by_hand():
    """x[2, 6] . w[6, 10] with the 6 split over 2: 2 * 2 * 3 * 10 on each, and an all-reduce of 2 x 10 numbers."""
    mesh = make_mesh(tensor=2)
    got = costs(
        lambda x, w: lax.psum(x @ w, TP), mesh, f32(2, 6), f32(6, 10), in_specs=(P(None, TP), P(TP)), out_specs=P()
    )
    assert got.flops == got.passes == 2 * 2 * 3 * 10
    assert got.collectives == (
        Collective(
            kind="all-reduce", axes=("kv",), runs=1, count=1, places=1,
            sent_bytes=2 * 10 * 4, link_bytes=2 * 10 * 4, beside=0.0,
        ),
    )  # fmt: skip


@pytest.mark.parametrize("precision, passes", [("highest", 6), ("high", 3), ("default", 1)])
def test_products_of_wide_floats_take_several_passes(precision, passes):
    got = costs_of(lambda x: jnp.dot(x, x, precision=precision), make_mesh(), f32(8, 8))
    assert (got.flops, got.passes) == (2 * 8**3, passes * 2 * 8**3)


def test_a_scan_counts_as_often_as_it_runs_and_a_condition_by_its_costliest_branch():
    mesh = make_mesh(context=4)

    def body(x):
        def step(x, i):
            y = lax.cond(i > 2, lambda x: x @ x @ x, lambda x: x, x)
            return lax.all_gather(y, "context", axis=0, tiled=True)[:8] * y, None

        return lax.scan(step, x, jnp.arange(5))[0]

    got = costs(body, mesh, f32(32, 8), in_specs=P("context"), out_specs=P("context"))
    assert got.flops == 5 * 2 * (2 * 8**3)
    sent = 5 * 3 * 8 * 8 * 4  # each sends its 8 x 8 numbers to three others
    assert got.collectives == (
        Collective(
            kind="all-gather", axes=("context",), runs=5, count=5, places=1,
            sent_bytes=sent, link_bytes=sent, beside=0.0,
        ),
    )  # fmt: skip


def test_every_kind_of_collective():
    mesh = make_mesh(context=4)

    def body(x):
        y = lax.all_to_all(x, "context", 1, 0, tiled=True)
        y = lax.psum_scatter(y, "context", scatter_dimension=0, tiled=True)
        y = lax.ppermute(y, "context", [(i, (i + 1) % 4) for i in range(4)])
        return lax.pmax(y, "context")

    got = costs(body, mesh, f32(16, 4), in_specs=P("context"), out_specs=P())
    found = {c.kind: c.sent_bytes for c in got.collectives}
    whole = 4 * 4 * 4  # bytes of the 4 x 4 numbers of a device
    assert found == {
        "all-to-all": whole * 3 // 4,
        "reduce-scatter": whole * 3 // 4,
        "collective-permute": whole // 4,
        "all-reduce": whole // 4 * 2 * 3 // 4,
    }
    forwarded = {c.kind: c.link_bytes for c in got.collectives}
    # A quarter each to the neighbours and over two links to the fourth: 4 quarters over the links of each.
    assert forwarded == found | {"all-to-all": whole}


def test_a_loop_of_unknown_length_is_refused():
    def loop(x, n):
        return lax.fori_loop(0, n, lambda i, x: x @ x, x)

    with pytest.raises(InputError, match="unknown length"):
        costs_of(loop, make_mesh(), f32(4, 4), jax.ShapeDtypeStruct((), jnp.int32))
    counted = costs_of(lambda x: loop(x, 5), make_mesh(), f32(4, 4))
    assert counted.flops == 5 * 2 * 4**3


def test_axes_of_one_device_send_nothing():
    mesh = make_mesh(tensor=1)
    got = costs(lambda x: lax.psum(x, TP), mesh, f32(4), in_specs=P(TP), out_specs=P())
    assert got.collectives == () and got.sent_bytes == 0


def test_convolutions():
    x, w = f32(2, 3, 9, 9), f32(5, 3, 3, 3)
    got = costs_of(lambda x, w: lax.conv(x, w, (1, 1), "VALID"), make_mesh(), x, w)
    assert got.flops == 2 * (2 * 5 * 7 * 7) * (3 * 3 * 3)


MESHES = [dict(tensor=4), dict(context=2, tensor=2), dict(data=2, context=4)]
HLO = re.compile(r" = (?:\([^)]*\)|\S+) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)\((.*)")


def compiled(function, arguments):
    """Kind -> how many collectives over more than one device the compiled text has.

    XLA combines all-reduces of one kind into one of several operands, and gives an all-to-all one for each device.
    """
    found = {}
    for line in jax.jit(function).lower(*arguments).compile().as_text().splitlines():
        match = HLO.search(line)
        if match and not re.search(r"replica_groups=(\{\{\d+\}|\[\d+,1\])", line):
            operands = len(re.findall(r"%[\w.-]+", match[2].split("), ")[0]))
            found[match[1]] = found.get(match[1], 0) + (operands if match[1] == "all-reduce" else 1)
    return found


QUICK = ("decoder", "flux", "t5", "wan", "qwen3-5")  # on the first mesh; the others compile for long


def cases():
    for name in TINY:
        for degrees in MESHES:
            quick = name in QUICK and degrees == MESHES[1]
            yield pytest.param(name, degrees, marks=() if quick else pytest.mark.slow, id=f"{name}-{degrees}")


def test_every_family_of_the_zoo_is_among_the_cases():
    assert set(TINY) == set(MODULES)


@pytest.mark.parametrize("name, degrees", cases())
def test_the_collectives_are_those_of_the_compiled_program(name, degrees):
    family, mesh = find_family(name), make_mesh(**degrees)
    declared = family.declare(TINY[name])
    function, arguments = family.trace(declared, mesh, SIZES)
    arguments = (layout.abstract(declared, mesh), *arguments)
    places = {}
    for c in costs_of(function, mesh, *arguments).collectives:
        places[c.kind] = places.get(c.kind, 0) + c.places
    assert places == compiled(function, arguments)


def test_the_work_of_a_decoder_is_split_by_the_mesh():
    """Products of all weights, of queries with keys and of probabilities with values; a quarter on each of four."""
    declared = decoder.declare(TINY["decoder"])
    one, four = (
        costs_of(*_traced(declared, make_mesh(**degrees))).flops for degrees in (dict(), dict(context=2, tensor=2))
    )
    c = TINY["decoder"]
    weights = sum(math.prod(p.shape) for p in layout.named(declared.blocks).values() if len(p.names) > 2)
    tokens = SIZES.batch * SIZES.tokens
    attention = c.layers * 4 * SIZES.batch * SIZES.tokens**2 * c.heads * c.head_dim
    want = 2 * tokens * (weights + c.vocab * c.embed) + attention
    assert np.isclose(one, want, rtol=0.02)
    assert np.isclose(four, one / 4, rtol=0.02)


def _traced(declared, mesh):
    function, arguments = find_family("decoder").trace(declared, mesh, SIZES)
    return function, mesh, layout.abstract(declared, mesh), *arguments


def test_what_may_hide_a_collective_is_what_does_not_depend_on_it():
    """Of x . a (all-reduced), then . b, and y . c beside them: only y . c can run while the sum is under way."""
    mesh = make_mesh(tensor=2)

    def body(x, a, b, y, c):
        return lax.psum(x @ a, TP) @ b, y @ c

    got = costs(
        body, mesh, f32(2, 6), f32(6, 10), f32(10, 12), f32(4, 8), f32(8, 16),
        in_specs=(P(None, TP), P(TP), P(), P(), P()), out_specs=(P(), P()),
    )  # fmt: skip
    (reduced,) = got.collectives
    assert reduced.beside == 2 * 4 * 8 * 16
    assert got.passes == 2 * 2 * 3 * 10 + 2 * 2 * 10 * 12 + reduced.beside


def test_weights_gathered_from_a_split_at_rest_hide_behind_all_of_a_block():
    mesh = make_mesh(data=4)

    def body(model, x):
        def block(x, w):
            return x @ lax.all_gather(w, "data", axis=0, tiled=True), None

        return lax.scan(block, x, model["w"])[0]

    mapped = jax.shard_map(body, mesh=mesh, in_specs=({"w": P(None, "data")}, P("data")), out_specs=P("data"))
    (gather,) = costs_of(mapped, mesh, {"w": f32(3, 8, 8)}, f32(4, 8)).collectives
    assert (gather.kind, gather.runs, gather.beside) == ("all-gather", 3, 3 * 2 * 8 * 8)


def test_work_is_told_by_part_of_the_model():
    model = {"blocks": {"attn": {"q": f32(8, 8)}, "mlp": {"up": f32(16, 8)}}, "head": f32(32, 8)}

    def f(model, x):
        q = lax.scan(lambda x, _: (x @ model["blocks"]["attn"]["q"].astype(x.dtype).T, None), x, None, length=5)[0]
        up = (q @ q.T) @ q @ model["blocks"]["mlp"]["up"][:4].T
        return up, q @ model["head"].T

    got = costs_of(f, make_mesh(), model, f32(2, 8))
    assert got.parts == {
        "attention": 5 * 2 * 2 * 8 * 8,
        "activations": 2 * (2 * 2 * 2 * 8),
        "mlp": 2 * 2 * 8 * 4,
        "head": 2 * 2 * 8 * 32,
    }
    assert got.passes == sum(got.parts.values())
