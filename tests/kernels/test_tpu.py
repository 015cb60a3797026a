"""What only the TPU kernels have: blocks of several kinds, dq's way through HBM, and the TPU compiler."""

import os
import re
from dataclasses import replace

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import attention_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import MASKED, PLAIN, Case
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tpu_interpreter import SMALL, WIDE, interpreted

from shardzoo.kernels.flash_attention import (
    flash_attention,
    tpu_backward,
    tpu_blocks,
    which_implementation,
)
from shardzoo.kernels.flash_attention.options import Extras, Options, Sizes

CASES = {case.name: case for case in [*PLAIN, *MASKED]}
TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "7x": "tpu7x:2x2x1"}


def on_chip(chip: str, call, *shapes: jax.ShapeDtypeStruct) -> str:
    """The compiled text of a call on one chip that this machine does not have."""
    device = topologies.get_topology_desc(TOPOLOGIES[chip], platform="tpu").devices[0]
    mesh = Mesh(np.array([device]), ("data",))
    whole = jax.shard_map(
        call, mesh=mesh, in_specs=tuple(P("data") for _ in shapes), out_specs=P("data"), check_vma=True
    )
    placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P("data"))) for x in shapes]
    return jax.jit(whole).lower(*placed).compile().as_text()


def gradients(**options):
    """Output and gradients of q, k, v (and the bias, if one is given) of one call."""

    def step(q, k, v, bias=None):
        def total(q, k, v, bias):
            given = {} if bias is None else {"bias": bias}
            out, lse = flash_attention(q, k, v, return_lse=True, **given, **options)
            return (out.astype(jnp.float32) ** 2).sum() + jnp.where(jnp.isneginf(lse), 0, lse).sum()

        operands = (0, 1, 2) if bias is None else (0, 1, 2, 3)
        return jax.grad(jax.checkpoint(total), operands)(q, k, v, bias)

    return step


def check(case: Case, blocks: dict = SMALL, params: pltpu.InterpretParams | None = None) -> None:
    """Outputs and gradients of a case in float32 against float64."""
    x, options = case.inputs("float32")

    def call(q, k, v):
        return flash_attention(q, k, v, return_lse=True, implementation="tpu", **options)

    with interpreted(blocks, params):
        (out, lse), pull = jax.vjp(call, x["q"], x["k"], x["v"])
        got = (out, lse, *pull((x["d_out"], x["d_lse"])))
    truth = oracle.attention(*x.values(), **options)
    for name, g in zip(("out", "lse", "dq", "dk", "dv"), got, strict=True):
        want = getattr(truth, name)
        np.testing.assert_array_equal(np.isneginf(g), np.isneginf(want))
        seen = ~np.isneginf(want)
        np.testing.assert_allclose(np.asarray(g)[seen], want[seen], rtol=0, atol=1e-5 * np.abs(want[seen]).max())


def tensors(length: int, heads: int, kv_heads: int, head_dim: int, dtype: str, kv_len: int | None = None) -> list:
    kv = (1, kv_len or length, kv_heads, head_dim)
    return [jax.ShapeDtypeStruct(s, dtype) for s in ((1, length, heads, head_dim), kv, kv)]


@pytest.mark.parametrize("chip", list(TOPOLOGIES))
def test_compiles_with_every_option(chip: str):
    """Forward, remat and backward under shard_map's type check, with all that needs masks at once."""
    ids = jnp.arange(300, dtype=jnp.int32)[None] // 100
    lengths = jnp.asarray([250], jnp.int32)
    options = {"causal": True, "window": 200, "soft_cap": 5.0, "kv_lengths": lengths, "q_lengths": lengths}
    shapes = [*tensors(300, 4, 2, 64, "bfloat16"), jax.ShapeDtypeStruct((1, 4, 300, 300), jnp.float32)]

    def call(q, k, v, bias):
        return gradients(**options, q_segment_ids=ids, kv_segment_ids=ids)(q, k, v, bias)

    text = on_chip(chip, call, *shapes)
    for kernel in ("attention_forward", "attention_backward", "attention_bias_gradient"):
        assert kernel in text


def test_compiles_with_loops_over_masked_parts():
    """Lengths and segments without a bias: masked code is a loop that slices segment ids where it stands."""
    ids = jnp.arange(1300, dtype=jnp.int32)[None] // 100
    call = gradients(causal=True, q_segment_ids=ids, kv_segment_ids=ids)
    assert "attention_backward" in on_chip("v5e", call, *tensors(1300, 2, 1, 128, "float32"))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256, 384, 512, 640, 1024])
@pytest.mark.parametrize("chip", list(TOPOLOGIES))
def test_presets_fit_into_vmem(chip: str, head_dim: int, dtype: str):
    """The blocks of long sequences, with masks, within the memory that the compiler gives a kernel by itself."""
    text = on_chip(chip, gradients(causal=True), *tensors(10001, 2, 1, head_dim, dtype))
    assert "attention_backward" in text


@pytest.mark.slow
@pytest.mark.parametrize("chip", list(TOPOLOGIES))
def test_presets_with_a_bias_fit_into_vmem(chip: str):
    shapes = [*tensors(4000, 2, 2, 128, "bfloat16"), jax.ShapeDtypeStruct((1, 2, 4000, 4000), jnp.float32)]
    assert "attention_bias_gradient" in on_chip(chip, gradients(), *shapes)


def test_heads_are_cut_out_by_the_kernel():
    """Projections to and from heads of 128 lanes: no activation is copied or transposed on its way."""
    x = jax.ShapeDtypeStruct((1, 1024, 512), jnp.bfloat16)
    w, wo = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1, 4, 128, 512), (1, 512, 4, 128)))

    def layer(x, wq, wk, wv, wo):
        q, k, v = (jnp.einsum("bse,hde->bshd", x, w[0]) for w in (wq, wk, wv))
        return jnp.einsum("bsf,ef->bse", flash_attention(q, k, v).reshape(x.shape), wo[0].reshape(512, 512))

    text = on_chip("v5e", layer, x, w, w, w, wo)
    assert "attention_forward" in text
    moved = [line for line in text.splitlines() if ("transpose(" in line or " copy(" in line) and "1024" in line]
    assert not moved, moved
    assert re.search(r"attention_forward.*output_to_operand_aliasing=", text), "the output takes the queries' place"


@pytest.mark.parametrize("name", ["causal-offset", "segments-cross"])
def test_blocks_of_wide_matrix_units(name: str):
    check(CASES[name], WIDE)


def test_a_head_of_many_channels():
    """One head of all channels, as in the autoencoders; some beyond whole lanes."""
    check(Case(name="head_dim-1000", q_len=150, kv_len=150, heads=1, kv_heads=1, head_dim=1000))


def test_unmasked_tiles_in_rounds():
    """More tiles of queries in a block than are written out at once: the rest in further rounds of a loop."""
    check(CASES["length-512"], SMALL | {"forward": replace(SMALL["forward"], written=2)})


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mode", ["on_wait", "eager"])
def test_dq_through_hbm(causal: bool, mode: str):
    """With copies that land as late as they may, and as early: no race, and the same dq."""
    blocks = {**SMALL, "backward": replace(SMALL["backward"], q=128, kv=128, tile_q=128, tile_kv=128)}
    params = pltpu.InterpretParams(dma_execution_mode=mode, detect_races=True)
    case = Case(name="hbm", q_len=600, kv_len=400, heads=1, kv_heads=1, options={"causal": causal})
    check(case, blocks, params)
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    assert not interpret_pallas_call.races.races_found


def test_dq_in_vmem_and_through_hbm_are_the_same():
    q, k, v = (jax.random.normal(jax.random.key(n), (1, 640, 1, 64)) for n in range(3))

    def dq():
        return jax.grad(lambda q: (flash_attention(q, k, v, causal=True, implementation="tpu") ** 2).sum())(q)

    with interpreted():
        through_hbm = dq()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tpu_backward, "_RESIDENT_BYTES", 2**30)
            in_vmem = dq()
    np.testing.assert_array_equal(through_hbm, in_vmem)


def test_shard_map_over_two_devices():
    """With the type check, and k and v whole on both devices: their gradients are summed."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("context",))
    q, k, v = (jax.random.normal(jax.random.key(n), (1, 256, 2, 64)) for n in range(3))

    def attend(q, k, v):
        offset = 128 * jax.lax.axis_index("context")
        return flash_attention(q, k, v, causal=True, q_offset=offset, implementation="tpu")

    split = P(None, "context")
    mapped = jax.shard_map(attend, mesh=mesh, in_specs=(split, P(), P()), out_specs=split, check_vma=True)
    with interpreted():
        got = jax.jit(jax.grad(lambda *x: (mapped(*x) ** 2).sum(), (0, 1, 2)))(q, k, v)
    want = jax.grad(lambda *x: (flash_attention(*x, causal=True, implementation="reference") ** 2).sum(), (0, 1, 2))(
        q, k, v
    )
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=5e-6 * float(jnp.abs(w).max()))


def test_no_less_accurate_than_splash():
    """bfloat16, against float64, beside the arithmetic of JAX's splash kernel on a TPU.

    That kernel takes scaled queries, holds logits and exponentials in float32, and multiplies values by
    exponentials that the matrix unit rounds to bfloat16. Its sum is of unrounded ones, as is ours.
    """
    rng = np.random.default_rng(3)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 640, 4, 128)), jnp.bfloat16) for _ in range(3))
    with interpreted():
        ours = flash_attention(q, k, v, implementation="tpu")
    wide = [x.astype(jnp.float32) for x in ((q.astype(jnp.float32) * 128**-0.5).astype(jnp.bfloat16), k, v)]
    logits = jnp.einsum("bqhd,bkhd->bhqk", *wide[:2], precision="highest")
    weights = jnp.exp(logits - logits.max(-1, keepdims=True))
    rounded = weights.astype(jnp.bfloat16).astype(jnp.float32)
    sums = jnp.einsum("bhqk,bkhd->bqhd", rounded, wide[2], precision="highest")
    splash = (sums / weights.sum(-1).swapaxes(1, 2)[..., None]).astype(jnp.bfloat16)
    zeros = np.zeros(q.shape), np.zeros(q.shape[:3])
    truth = oracle.attention(q, k, v, *zeros).out

    def error(x):
        return np.linalg.norm(np.asarray(x, np.float64) - truth) / np.linalg.norm(truth)

    assert error(ours) <= 1.01 * error(splash)


def test_blocks_share_out_a_length():
    """4,608 tokens are three whole blocks; 32,760 end in a block that lacks 8; 77 are one."""
    blocks = tpu_blocks.Blocks(q=2048, kv=2048, tile_q=128, tile_kv=128)
    assert tpu_blocks.fitted(blocks, 4608, 32760) == replace(blocks, q=1536)
    assert tpu_blocks.fitted(blocks, 77, 300) == replace(blocks, q=128, kv=384)


def test_edges_of_blocks_agree_with_pairs():
    """Which blocks meet, and which need no mask, told from every pair."""
    size = Sizes(1, 700, 900, 1, 1, 1, 64)
    blocks = tpu_blocks.Blocks(q=128, kv=256, tile_q=128, tile_kv=128)
    rows, keys = np.arange(700)[:, None], np.arange(900)[None]
    for after, before, offset in ((0, None, 200), (0, 150, 200), (99, 99, -50), (None, None, 0), (0, None, -300)):
        options = Options(scale=1.0, after=after, before=before, q_offset=offset)
        call = tpu_blocks.call_of("forward", size, 2, Extras(), options, blocks)
        seen = np.ones((700, 900), bool)
        if after is not None:
            seen &= keys <= rows + offset + after
        if before is not None:
            seen &= keys >= rows + offset - before
        edges = tpu_blocks.Edges(call, np.zeros(3, np.int32), 0)
        for i in range(call.q_blocks):
            for j in range(call.kv_blocks):
                part = seen[i * 128 : i * 128 + 128, j * 256 : j * 256 + 256]
                assert bool(edges.some_visible(i * 128, 128, j * 256, 256)) or not part.any()
                assert bool(edges.meet(jnp.int32(i), jnp.int32(j))) == part.any(), (i, j, after, before, offset)
                if edges.whole(i, j):
                    assert part.all() and part.shape[1] == 256


def test_which_implementation():
    q, k, v = tensors(128, 2, 2, 64, "bfloat16")
    assert which_implementation(q, k, v, platform="tpu").implementation == "tpu"
    half = tensors(128, 2, 2, 64, "float16")
    choice = which_implementation(*half, platform="tpu")
    assert choice.implementation == "blockwise" and "float16" in choice.reason
