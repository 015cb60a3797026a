"""Each layer alone on several meshes, forward and gradient, against its float64 definition."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax
from mesh_parity import check, on_mesh

from shardzoo.zoo import layers
from shardzoo.zoo.layers import (
    ColumnLinear,
    Embedding,
    LayerNorm,
    RMSNorm,
    RowLinear,
    SplitInputLinear,
    gather_residual,
    norm_together,
    row_sum,
)
from shardzoo.zoo.layout import Param, astype, gather_at_rest, place, split_at_rest, stack
from shardzoo.zoo.layout import specs as specs_of
from shardzoo.zoo.mesh import TP, Degrees, make_mesh

MESHES = [
    dict(),
    dict(tensor=2),
    dict(tensor=4, kv_heads=2),
    dict(data=2, tensor=4, kv_heads=4),
    dict(context=2, tensor=2, data=2),
    dict(tensor=8, kv_heads=2),
]
B, S, E, H, D, M, V = 4, 6, 24, 8, 5, 16, 40
rng = np.random.default_rng(3)


@pytest.fixture(scope="module")
def meshes():
    return [make_mesh(**degrees) for degrees in MESHES]


def x_of(*shape):
    return rng.normal(size=shape).astype(np.float32)


def test_column(meshes):
    decl = ColumnLinear(
        Param("heads head_dim embed", (H, D, E), {"heads": TP}),
        Param("heads head_dim", (H, D), {"heads": TP}),
    )
    check(
        decl,
        meshes,
        lambda m, x: m(x),
        lambda m, x: jnp.einsum("bse,hde->bshd", x, m.weight) + m.bias,
        [x_of(B, S, E)],
        [P("data", "context")],
        P("data", "context", TP),
    )


def test_packed_column(meshes):
    decl = ColumnLinear(
        Param("block heads head_dim embed", (3, H, D, E), {"heads": TP}),
        Param("block heads head_dim", (3, H, D), {"heads": TP}),
    )
    check(
        decl,
        meshes,
        lambda m, x: m(x),
        lambda m, x: jnp.einsum("bse,phde->bsphd", x, m.weight) + m.bias,
        [x_of(B, S, E)],
        [P("data", "context")],
        P("data", "context", None, TP),
    )


def row(out=E):
    return RowLinear(Param("embed heads head_dim", (out, H, D), {"heads": TP}), Param("embed", (out,)))


def row_reference(m, x):
    return jnp.einsum("bshd,ehd->bse", x, m.weight) + m.bias


def test_row(meshes):
    check(
        row(),
        meshes,
        lambda m, x: m(x),
        row_reference,
        [x_of(B, S, H, D)],
        [P("data", "context", TP)],
        P("data", "context"),
    )


class Packed(eqx.Module):
    attention: RowLinear
    mlp: RowLinear


def test_packed_row_reduces_once(meshes):
    decl = Packed(row(), RowLinear(Param("embed mlp", (E, M), {"mlp": TP}), Param("embed", (E,))))
    specs = [P("data", "context", TP), P("data", "context", TP)]

    def call(m, a, b):
        return row_sum((m.attention, a), (m.mlp, b))

    check(
        decl,
        meshes,
        call,
        lambda m, a, b: row_reference(m.attention, a) + b @ m.mlp.weight.T + m.mlp.bias,
        [x_of(B, S, H, D), x_of(B, S, M)],
        specs,
        P("data", "context"),
    )
    shapes = [jax.ShapeDtypeStruct(s, np.float32) for s in [(B, S, H, D), (B, S, M)]]
    abstract = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), decl)
    text = on_mesh(decl, meshes[-1], call, specs, P("data", "context")).lower(abstract, *shapes).compile().as_text()
    assert text.count(" all-reduce(") == 1


def test_split_input(meshes):
    decl = SplitInputLinear(Param("block embed cond", (6, E, M), {"cond": TP}), Param("block embed", (6, E)))
    check(
        decl,
        meshes,
        lambda m, x: m(x),
        lambda m, x: jnp.einsum("bsc,pec->bspe", x, m.weight) + m.bias,
        [x_of(B, 1, M)],
        [P("data")],
    )


def test_embedding(meshes):
    decl = Embedding(Param("vocab embed", (V, E), {"vocab": TP}))
    ids = rng.integers(0, V, (B, S)).astype(np.int32)
    check(decl, meshes, lambda m, i: m(i), lambda m, i: m.weight[i], [ids], [P("data")])


def test_tied_head(meshes):
    decl = Embedding(Param("vocab embed", (V, E), {"vocab": TP}))
    check(
        decl,
        meshes,
        lambda m, x: m.logits(x),
        lambda m, x: x @ m.weight.T,
        [x_of(B, S, E)],
        [P("data")],
        P("data", None, TP),
    )


def rms(x, weight, axes, offset=0.0):
    return x / jnp.sqrt(jnp.mean(x**2, axis=axes, keepdims=True) + 1e-6) * (weight + offset)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(meshes, offset):
    decl = RMSNorm(Param("embed", (E,)), offset=offset)
    check(
        decl,
        meshes,
        lambda m, x: m(x),
        lambda m, x: rms(x, m.weight, (-1,), offset),
        [x_of(B, S, E)],
        [P("data")],
    )


def test_rms_norm_across_devices(meshes):
    decl = RMSNorm(Param("heads head_dim", (H, D), {"heads": TP}), axis=TP)
    spec = P("data", None, TP)
    check(
        decl,
        meshes,
        lambda m, x: m(x),
        lambda m, x: rms(x, m.weight, (-2, -1)),
        [x_of(B, S, H, D)],
        [spec],
        spec,
    )


class Norms(eqx.Module):
    q: RMSNorm
    k: RMSNorm


def test_norms_together(meshes):
    param = Param("heads head_dim", (H, D), {"heads": TP})
    decl = Norms(RMSNorm(param, axis=TP), RMSNorm(param, axis=TP))
    spec = P("data", None, TP)

    def call(m, q, k):
        return jnp.concatenate(norm_together((m.q, q), (m.k, k)), axis=1)

    check(
        decl,
        meshes,
        call,
        lambda m, q, k: jnp.concatenate([rms(q, m.q.weight, (-2, -1)), rms(k, m.k.weight, (-2, -1))], axis=1),
        [x_of(B, S, H, D), x_of(B, S, H, D)],
        [spec, spec],
        spec,
    )


def test_layer_norm(meshes):
    decl = LayerNorm(Param("embed", (E,)), Param("embed", (E,)), eps=1e-5)

    def reference(m, x):
        mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return (x - mean) / jnp.sqrt(var + 1e-5) * m.weight + m.bias

    check(decl, meshes, lambda m, x: m(x), reference, [x_of(B, S, E)], [P("data")])


class Mlp(eqx.Module):
    norm: RMSNorm
    up: ColumnLinear
    down: RowLinear

    @classmethod
    def declare(cls):
        return cls(
            RMSNorm(Param("embed", (E,))),
            ColumnLinear(Param("block mlp embed", (2, M, E), {"mlp": TP}), Param("block mlp", (2, M), {"mlp": TP})),
            RowLinear(Param("embed mlp", (E, M), {"mlp": TP}), Param("embed", (E,))),
        )

    def __call__(self, x, residual="whole"):
        h = self.up(gather_residual(self.norm(x), residual))
        return x + self.down(jax.nn.silu(h[:, :, 0]) * h[:, :, 1], residual)


def mlp_reference(m, x):
    h = jnp.einsum("bse,pme->bspm", rms(x, m.norm.weight, (-1,)), m.up.weight) + m.up.bias
    return x + (jax.nn.silu(h[:, :, 0]) * h[:, :, 1]) @ m.down.weight.T + m.down.bias


@pytest.mark.parametrize("residual", ["whole", "seq"])
def test_residual_stream(meshes, residual):
    spec = P("data", TP) if residual == "seq" else P("data")
    x = x_of(B, 16, E)
    check(Mlp.declare(), meshes, lambda m, x: m(x, residual), mlp_reference, [x], [spec], spec)


@pytest.mark.parametrize("axis", ["data", "context"])
def test_split_at_rest(axis):
    """A stack of blocks, its weights split over one more axis and gathered block by block inside the scan."""
    mesh = make_mesh(**{axis: 2}, tensor=4, kv_heads=2)
    decl = split_at_rest(stack(Mlp.declare(), 3), axis, Degrees.of(mesh), smallest=1)
    assert all(p.rest for p in jax.tree.leaves(decl))

    def call(blocks, x):
        return lax.scan(lambda x, block: (gather_at_rest(block, decl)(x), None), x, blocks)[0]

    def reference(blocks, x):
        return lax.scan(lambda x, block: (mlp_reference(block, x), None), x, blocks)[0]

    check(decl, [mesh], call, reference, [x_of(B, S, E)], [P("data", "context")], P("data", "context"))


# The faults that these checks are there for, made on purpose.


def faulty(monkeypatch, wrong):
    monkeypatch.setattr(layers.RowLinear, "__call__", wrong)
    mesh = make_mesh(tensor=4, kv_heads=2)
    check(row(), [mesh], lambda m, x: m(x), row_reference, [x_of(B, S, H, D)], [P("data", None, TP)])


def test_a_doubled_psum_is_caught(monkeypatch):
    with pytest.raises(AssertionError, match="of the reference's maximum"):
        faulty(monkeypatch, lambda self, x: lax.psum(lax.psum(self.partial(x), TP), TP) + self.bias)


def test_a_bias_added_on_every_device_is_caught(monkeypatch):
    with pytest.raises(AssertionError, match="of the reference's maximum"):
        faulty(monkeypatch, lambda self, x: lax.psum(self.partial(x) + self.bias, TP))


def test_a_missing_psum_is_caught(monkeypatch):
    with pytest.raises(ValueError, match=r"(?s)out_specs.*varying"):
        faulty(monkeypatch, lambda self, x: self.partial(x) + self.bias)


def test_a_psum_over_half_of_the_tensor_axes_is_caught(monkeypatch):
    with pytest.raises(ValueError, match=r"(?s)out_specs.*rep"):
        faulty(monkeypatch, lambda self, x: lax.psum(self.partial(x), "kv") + self.bias)


def test_a_wrong_split_is_caught():
    mesh = make_mesh(tensor=2)
    decl = RowLinear(Param("embed heads head_dim", (E, H, D), {"embed": TP}), Param("embed", (E,)))
    with pytest.raises(Exception, match=r"(?i)shape|dimension|size"):
        check(decl, [mesh], lambda m, x: m(x), row_reference, [x_of(B, S, H, D)], [P("data", None, TP)])
    swapped = RowLinear(Param("embed heads head_dim", (E, H, H), {"head_dim": TP}), Param("embed", (E,)))
    with pytest.raises(Exception, match=r"(?i)shape|dimension|size|maximum"):
        check(swapped, [mesh], lambda m, x: m(x), row_reference, [x_of(B, S, H, H)], [P("data", None, TP)])


@pytest.mark.parametrize("rows", [1, 2])
def test_logits_of_few_rows_leave_a_16_bit_table_as_it_is(rows):
    """XLA for CPUs widens the whole table for the product with one row, and keeps it so while tokens are decoded."""
    mesh, vocab, embed = make_mesh(), 1024, 256
    decl = astype(Embedding(Param("vocab embed", (vocab, embed), {"vocab": TP})), jnp.bfloat16)
    table, y = (jnp.asarray(rng.normal(size=size), jnp.bfloat16) for size in ((vocab, embed), (1, rows, embed)))
    run = jax.shard_map(
        lambda m, y: m.logits(y), mesh=mesh, in_specs=(specs_of(decl), P()), out_specs=P(None, None, TP)
    )
    compiled = jax.jit(run).lower(place(decl, mesh, Embedding(table)), y).compile()
    assert f"f32[{vocab},{embed}]" not in compiled.as_text()
    expected = np.asarray(y, np.float32) @ np.asarray(table, np.float32).T
    got = np.asarray(compiled(place(decl, mesh, Embedding(table)), y), np.float32)
    assert np.abs(got - expected).max() <= 2**-8 * np.abs(expected).max()
