"""Every implementation against float64, on every case, forward and backward."""

from functools import lru_cache

import attention_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import MASKED, PLAIN, Case
from attention_runners import RUNNERS, Runner

from shardzoo.kernels.flash_attention import flash_attention

# The error allowed, relative to the greatest magnitude of the array. In bfloat16 the result itself is
# rounded to 8 bits, and a kernel may round the weights to it for the matrix unit. A logit x is known to half a
# unit in its last place, x * 2**-24, and exp makes that a relative error of the weight: it is added to both.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2.0**-7}
CASES = {case.name: case for case in PLAIN + MASKED}
IN_BFLOAT16 = [
    "length-1",
    "length-77",
    "length-257",
    "head_dim-80",
    "head_dim-256",
    "gqa-9-3",
    "decode",
    "causal-offset",
    "window-causal",
    "lengths-empty-rows",
    "segments",
    "bias-shared",
    "soft-cap-bias",
    "large-logits",
    "everything",
]


def pairs(cases: list[Case]) -> list:
    """Each runner with each case; those that take long there are marked slow."""
    return [
        pytest.param(r, c, id=f"{r.implementation}-{c.name}", marks=[pytest.mark.slow] if c.logits > r.quick else [])
        for c in cases
        for r in RUNNERS
    ]


@lru_cache(maxsize=1)
def truth_of(name: str, dtype: str) -> oracle.Truth:
    """The truth of a case; the runners of one case follow each other."""
    x, options = CASES[name].inputs(dtype)
    return oracle.attention(*x.values(), **options)


def run(runner: Runner, x: dict, options: dict) -> dict[str, np.ndarray]:
    """out, lse and the gradients, by the implementation, compiled as one program."""
    bias = options.get("bias")
    rest = {name: o for name, o in options.items() if name != "bias"}

    def call(q, k, v, bias):
        given = {} if bias is None else {"bias": bias}
        return flash_attention(q, k, v, return_lse=True, implementation=runner.implementation, **given, **rest)

    @jax.jit
    def everything(q, k, v, bias, d_out, d_lse):
        (out, lse), pull = jax.vjp(call, q, k, v, bias)
        return out, lse, *pull((d_out, d_lse))

    with runner.context():
        results = everything(x["q"], x["k"], x["v"], bias, x["d_out"], x["d_lse"])
    return dict(zip(("out", "lse", "dq", "dk", "dv", "dbias"), results, strict=True))


def error(got: jax.Array, want: np.ndarray) -> float:
    """The greatest difference, relative to the greatest value; infinities have to agree."""
    got = np.asarray(got).astype(np.float64)
    infinite = np.isneginf(want)
    assert np.array_equal(np.isneginf(got), infinite)
    assert np.isfinite(got[~infinite]).all()
    got, want = np.where(infinite, 0, got), np.where(infinite, 0, want)
    return np.abs(got - want).max() / max(np.abs(want).max(), 1e-30)


def check(runner: Runner, case: Case, dtype: str) -> None:
    x, options = case.inputs(dtype)
    got = run(runner, x, options)
    truth = truth_of(case.name, dtype)
    assert got["out"].dtype == dtype and got["lse"].dtype == jnp.float32
    errors = {n: error(g, getattr(truth, n)) for n, g in got.items() if g is not None}
    assert (got["dbias"] is None) == (truth.dbias is None)
    rounding = truth.greatest_logit * 2.0**-24
    bounds = {n: TOLERANCE["float32" if n == "lse" else dtype] + rounding for n in errors}
    if runner.rounds_queries and dtype == "bfloat16":
        # The scaled query has 8 bits, and so has a logit x: half a unit in its last place is x * 2**-9.
        bounds["lse"] += truth.greatest_logit * 2.0**-9
    assert all(errors[n] <= bounds[n] for n in errors), errors


@pytest.mark.parametrize(("runner", "case"), pairs(list(CASES.values())))
def test_float32(runner: Runner, case: Case):
    check(runner, case, "float32")


@pytest.mark.parametrize(("runner", "case"), pairs([CASES[name] for name in IN_BFLOAT16]))
def test_bfloat16(runner: Runner, case: Case):
    check(runner, case, "bfloat16")


@pytest.mark.parametrize(
    ("runner", "case"),
    [
        pytest.param(r, c, id=f"{r.implementation}-{c.name}")
        for r in RUNNERS
        if r.implementation in ("reference", "blockwise")
        for c in MASKED
        if c.name in ("lengths-causal", "window-offset", "bias-gqa-causal", "everything")
    ],
)
def test_float64(runner: Runner, case: Case):
    """With twice the digits a term that is left out, or counted twice, cannot pass for rounding."""
    with jax.enable_x64(True):
        x, options = case.inputs("float64")
        x["d_lse"] = x["d_lse"].astype(jnp.float64)
        if "bias" in options:
            options["bias"] = options["bias"].astype(jnp.float64)
        got = run(runner, x, options)
        truth = oracle.attention(*x.values(), **options)
        errors = {n: error(g, getattr(truth, n)) for n, g in got.items() if g is not None}
    assert max(errors.values()) <= 1e-12, errors
