"""Rules: pieces tile their leaves, and slicing and reshaping by them moves every value to its place."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardzoo.checkpoints.grid import Grid
from shardzoo.convert.recognise import common_prefixes, is_wrapper, looks_like
from shardzoo.convert.rules import Piece, Rule, expand, expected, gaps, groups, overlap, part, unit
from shardzoo.convert.stream import blocks_of
from shardzoo.zoo.layout import Param

# A block whose source packs rows [q | k | v], unequal, and columns [attn | mlp]: q alone, k and v in one leaf.
PARAMS = {
    "q": Param("layer heads head_dim embed", (3, 4, 2, 5)),
    "kv": Param("layer block kv_heads head_dim embed", (3, 2, 2, 2, 5)),
    "out": Param("layer embed heads head_dim", (3, 5, 4, 2)),
    "down": Param("layer embed mlp", (3, 5, 6)),
    "norm": Param("embed", (5,)),
}
RULES = (
    Rule(target="q", source="{root}{layer}.qkv", dims="(heads head_dim) embed"),
    Rule(target="kv", source="{root}{layer}.qkv", dims="(kv_heads head_dim) embed", at={"block": 0}, start={0: 8}),
    Rule(target="kv", source="{root}{layer}.qkv", dims="(kv_heads head_dim) embed", at={"block": 1}, start={0: 12}),
    Rule(target="out", source="{root}{layer}.out", dims="embed (heads head_dim)"),
    Rule(target="down", source="{root}{layer}.out", dims="embed mlp", start={1: 8}),
    Rule(target="norm", source="norm", dims="embed"),
    Rule(target="bias", source="{root}{layer}.bias", dims="embed"),
)
ROOTS = {"root": "b."}


def move(pieces, params, sources):
    leaves = {path: np.full(param.shape, -1) for path, param in params.items()}
    for piece in pieces:
        block = sources[piece.source][tuple(slice(a, b) for a, b in piece.take)]
        where = tuple(slice(a, b) for a, b in piece.at)
        leaves[piece.target][where] = block.reshape(leaves[piece.target][where].shape)
    return leaves


def test_groups_are_read_from_the_dims_of_a_rule():
    assert groups("(heads head_dim) embed") == [["heads", "head_dim"], ["embed"]]
    assert groups("embed") == [["embed"]]


def test_packed_sources_are_cut_into_unequal_leaves():
    shapes = {key: want.shape for key, want in expected(RULES, PARAMS, ROOTS).items()}
    assert shapes == {
        **{f"b.{i}.qkv": (16, 5) for i in range(3)},
        **{f"b.{i}.out": (5, 14) for i in range(3)},
        "norm": (5,),
    }
    pieces = expand(RULES, PARAMS, ROOTS)
    assert gaps(pieces, PARAMS) == []
    sources = {
        key: np.arange(math.prod(shape)).reshape(shape) + 1000 * i for i, (key, shape) in enumerate(shapes.items())
    }
    leaves = move(pieces, PARAMS, sources)
    qkv, out = sources["b.1.qkv"], sources["b.1.out"]
    np.testing.assert_array_equal(leaves["q"][1], qkv[:8].reshape(4, 2, 5))
    np.testing.assert_array_equal(leaves["kv"][1, 0], qkv[8:12].reshape(2, 2, 5))
    np.testing.assert_array_equal(leaves["kv"][1, 1], qkv[12:].reshape(2, 2, 5))
    np.testing.assert_array_equal(leaves["out"][1], out[:, :8].reshape(5, 4, 2))
    np.testing.assert_array_equal(leaves["down"][1], out[:, 8:])
    back = {key: np.full(shape, -1) for key, shape in shapes.items()}
    for piece in pieces:
        take = tuple(slice(a, b) for a, b in piece.take)
        block = leaves[piece.target][tuple(slice(a, b) for a, b in piece.at)]
        back[piece.source][take] = block.reshape(back[piece.source][take].shape)
    for key in shapes:
        np.testing.assert_array_equal(back[key], sources[key])


def test_rules_that_leave_a_gap_or_overlap_are_found():
    pieces = expand(RULES, PARAMS, ROOTS)
    assert any("do not fill" in problem for problem in gaps(pieces[1:], PARAMS))
    twice = [*pieces[1:], pieces[1]]
    assert overlap(twice[-1], pieces[1]) and any("overlaps" in problem for problem in gaps(twice, PARAMS))
    wrong = [Piece("norm", ((0, 5),), "norm", ((0, 4),))]
    assert any("another volume" in problem for problem in gaps(wrong, {"norm": PARAMS["norm"]}))


def test_unit_is_the_border_between_pieces():
    pieces = expand(RULES, PARAMS, ROOTS)
    assert unit([p for p in pieces if p.target == "kv"], PARAMS["kv"].shape) == (1, 1, 2, 2, 5)
    assert unit([p for p in pieces if p.target == "norm"], (5,)) == (5,)


@st.composite
def cuts(draw):
    """A piece of a leaf whose dims its source merges in some way, and a grid over the leaf."""
    rank = draw(st.integers(1, 4))
    shape = tuple(draw(st.integers(1, 5)) for _ in range(rank))
    at = tuple(sorted(draw(st.tuples(st.integers(0, n - 1), st.integers(1, n)))) for n in shape)
    at = tuple((a, max(b, a + 1)) for a, b in at)
    sizes = [b - a for a, b in at]
    borders = sorted(draw(st.sets(st.integers(1, rank - 1)))) if rank > 1 else []
    merged = [sizes[i:j] for i, j in zip([0, *borders], [*borders, rank], strict=True)]
    starts = [draw(st.integers(0, 2)) for _ in merged]
    take = tuple((s, s + math.prod(group)) for s, group in zip(starts, merged, strict=True))
    outer = tuple(draw(st.integers(1, n)) for n in shape)
    return shape, at, take, outer


@settings(max_examples=400, deadline=None)
@given(cuts(), st.integers(0, 2))
def test_any_cut_of_a_piece_finds_its_values_in_the_rows_it_names(cut, margin):
    shape, at, take, outer = cut
    piece, grid = Piece("leaf", at, "key", take), Grid(shape=shape, outer=outer, inner=outer)
    source = np.arange(math.prod(b + margin for _, b in piece.take)).reshape([b + margin for _, b in piece.take])
    leaf = np.full(shape, -1)
    inside = tuple(slice(a, b) for a, b in piece.at)
    leaf[inside] = source[tuple(slice(a, b) for a, b in piece.take)].reshape(leaf[inside].shape)
    found = np.full(shape, -1)
    for block in blocks_of(piece.at, grid):
        share = part(piece, block)
        rows = source[slice(*share.rows)][(slice(None), *(slice(a, b) for a, b in share.columns))].reshape(-1)
        values = rows[share.first : share.first + math.prod(share.cover)].reshape(share.cover)[share.cut]
        where = tuple(slice(a, b) for a, b in share.at)
        assert (found[where] == -1).all()
        found[where] = values
    np.testing.assert_array_equal(found, leaf)


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        (["double_blocks.0.img_attn.qkv.weight", "single_blocks.0.linear1.weight"], "FLUX"),
        (["transformer_blocks.0.attn.to_q.weight", "single_transformer_blocks.0.attn.to_q.weight"], "FLUX"),
        (["blocks.0.cross_attn.q.weight", "patch_embedding.weight"], "Wan, original"),
        (["blocks.0.attn2.to_q.weight", "condition_embedder.time_proj.weight"], "Wan, diffusers"),
        (["layers.0.attention.wq.weight", "tok_embeddings.weight"], "authors' own layout"),
        (["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"], "LoRA"),
        (["model.layers.0.self_attn.q_proj.qweight"], "quantized"),
        (["encoder.block.0.layer.0.SelfAttention.q.weight"], "T5"),
        (["foo.bar"], "nothing known"),
        ([], "no tensors"),
    ],
)
def test_files_are_recognised_by_their_keys(keys, word):
    assert word in looks_like(keys)


def test_common_prefixes_are_found_and_wrappers_known():
    assert common_prefixes(["a.b.c", "a.b.d"]) == ["", "a.", "a.b."]
    assert common_prefixes(["a.b", "c.b"]) == [""]
    assert is_wrapper("module._orig_mod.") and not is_wrapper("module.policy.") and is_wrapper("")
    assert is_wrapper("model.model.") and is_wrapper("net.") and not is_wrapper("policy.net.")
