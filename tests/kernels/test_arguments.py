"""What the public function refuses, what it says then, and which implementation it says will run."""

import jax
import jax.numpy as jnp
import pytest

from shardzoo.errors import InputError
from shardzoo.kernels.flash_attention import flash_attention, merge, which_implementation
from shardzoo.kernels.flash_attention.arguments import prepare
from shardzoo.kernels.flash_attention.options import Extras

Q, K = jnp.ones((2, 6, 4, 8)), jnp.ones((2, 10, 2, 8))
IDS = jnp.zeros((2, 10), jnp.int32)


@pytest.mark.parametrize(
    ("arrays", "options", "said"),
    [
        ((jnp.ones((2, 6, 5, 8)), K, K), {}, "heads=5 does not divide by kv_heads=2: use e.g. heads=4"),
        ((Q, K.astype(jnp.bfloat16), K), {}, "dtypes float32, bfloat16, float32 differ: cast them to one"),
        ((Q.astype(jnp.float8_e4m3fn),) + (K.astype(jnp.float8_e4m3fn),) * 2, {}, "must be of float32"),
        ((Q, K, K), {"window": 0}, "window=0 must be at least 1"),
        ((Q, K, K), {"soft_cap": 0.0}, "soft_cap=0.0 must be positive"),
        ((Q, K, K), {"kv_segment_ids": IDS}, "only one is given: give both"),
        (
            (Q, K, K),
            {"bias": jnp.ones((3, 4, 6, 10))},
            r"shape \(3, 4, 6, 10\) must be \(1 or 2, 1 or 4, 6, 10\)",
        ),
        ((Q, K, K), {"implementation": "cudnn"}, "'cudnn' is unknown: use one of 'reference', 'blockwise'"),
    ],
)
def test_refused(arrays: tuple, options: dict, said: str):
    with pytest.raises(InputError, match=said):
        flash_attention(*arrays, **options)


def test_every_problem_in_one_message():
    with pytest.raises(InputError) as caught:
        flash_attention(Q, K, K, window=-1, soft_cap=-1.0, kv_segment_ids=IDS)
    assert all(word in str(caught.value) for word in ("window=-1", "soft_cap=-1.0", "kv_segment_ids"))


def test_shapes_that_differ_are_named():
    """What jaxtyping refuses at the call is also refused where only shapes are given."""
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2, 6, 4, 8), (3, 10, 2, 16), (3, 9, 2, 16))]
    with pytest.raises(InputError) as caught:
        which_implementation(*shapes, q_lengths=jax.ShapeDtypeStruct((5,), jnp.float32))
    said = str(caught.value)
    assert all(word in said for word in ("batch=2 and 3", "head_dim=8 and 16", "(5,) must be (2,)", "integer"))


@pytest.mark.parametrize(
    ("q_len", "given", "band"),
    [
        (1, {"causal": True}, (None, None, 0)),
        (6, {"causal": True}, (None, 0, 4)),
        (6, {"causal": True, "q_offset": 9}, (None, None, 0)),
        # The first query stands at key 4 and sees up to key 13, the last at key 9 sees back to key 0.
        (6, {"window": 10}, (None, None, 0)),
        (6, {"window": 9}, (8, None, 4)),
        (6, {"window": 3}, (2, 2, 4)),
        (6, {"window": 100}, (None, None, 0)),
    ],
)
def test_bounds_that_hide_nothing_are_dropped(q_len: int, given: dict, band: tuple):
    """Equal calls become equal options, so that a decode step runs no mask."""
    defaults = {"causal": False, "window": None, "scale": None, "soft_cap": None, "q_offset": None}
    extras, options = prepare(jnp.ones((2, q_len, 4, 8)), K, K, **{**defaults, **given}, arrays=Extras())
    assert extras.q_offset is None
    assert (options.before, options.after, options.q_offset) == band


def test_which_implementation():
    chosen = which_implementation(Q, K, K, causal=True)
    assert (chosen.platform, chosen.implementation) == ("cpu", "blockwise")
    assert str(chosen) == "blockwise on cpu: there is no kernel for cpu"
    assert which_implementation(Q, K, K, platform="rocm").implementation == "blockwise"


def test_empty_lengths():
    out, lse = flash_attention(Q, K[:, :0], K[:, :0], return_lse=True)
    assert not out.any() and jnp.isneginf(lse).all()
    assert flash_attention(Q[:, :0], K, K).shape == (2, 0, 4, 8)


def test_merge_needs_one_lse_per_output():
    with pytest.raises(InputError, match="outs=1 lses=0"):
        merge([Q], [])
