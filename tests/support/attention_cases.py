"""Attention calls that every implementation is tested on: sizes of real models, and what tends to go wrong."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes and options of a call. `arrays` makes the array options from a generator and the case."""

    name: str
    q_len: int
    kv_len: int
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 64
    spread: float = 1.0
    options: Mapping = field(default_factory=dict)
    arrays: Callable[[np.random.Generator, "Case"], dict] | None = None

    @property
    def logits(self) -> int:
        return self.batch * self.heads * self.q_len * self.kv_len

    def inputs(self, dtype: str) -> tuple[dict, dict]:
        """The arrays q, k, v, d_out, d_lse and the options, the same on every call."""
        rng = np.random.default_rng(sum(map(ord, self.name)))
        query = (self.batch, self.q_len, self.heads, self.head_dim)
        key = (self.batch, self.kv_len, self.kv_heads, self.head_dim)
        shapes = {"q": query, "k": key, "v": key, "d_out": query}
        x = {n: jnp.asarray(rng.normal(size=s) * (self.spread if n in "qk" else 1), dtype) for n, s in shapes.items()}
        x["d_lse"] = jnp.asarray(rng.normal(size=query[:3]), jnp.float32)
        return x, {**self.options, **(self.arrays(rng, self) if self.arrays else {})}


def lengths(q: list[int] | None = None, kv: list[int] | None = None) -> Callable:
    def make(rng: np.random.Generator, case: Case) -> dict:
        given = {"q_lengths": q, "kv_lengths": kv}
        return {name: jnp.asarray(x, jnp.int32) for name, x in given.items() if x is not None}

    return make


def packed(rng: np.random.Generator, case: Case) -> dict:
    """Sequences packed one after another; the keys hold an id that no query has, and the reverse."""
    q = np.sort(rng.integers(0, 4, (case.batch, case.q_len)), axis=1)
    kv = np.sort(rng.integers(1, 5, (case.batch, case.kv_len)), axis=1)
    return {"q_segment_ids": jnp.asarray(q, jnp.int32), "kv_segment_ids": jnp.asarray(kv, jnp.int32)}


def shuffled(rng: np.random.Generator, case: Case) -> dict:
    """Segments in no order at all."""
    q, kv = rng.integers(0, 3, (case.batch, case.q_len)), rng.integers(0, 3, (case.batch, case.kv_len))
    return {"q_segment_ids": jnp.asarray(q, jnp.int32), "kv_segment_ids": jnp.asarray(kv, jnp.int32)}


def bias(batch: bool, heads: bool, hidden: float = 0.0) -> Callable:
    """A random bias; a share `hidden` of it is -inf, and so are two whole rows and one whole column."""

    def make(rng: np.random.Generator, case: Case) -> dict:
        shape = (case.batch if batch else 1, case.heads if heads else 1, case.q_len, case.kv_len)
        x = rng.normal(size=shape)
        if hidden:
            x = np.where(rng.random(shape) < hidden, -np.inf, x)
            x[..., [0, case.q_len // 2], :] = -np.inf
            x[..., case.kv_len // 3] = -np.inf
        return {"bias": jnp.asarray(x, jnp.float32)}

    return make


def together(*makers: Callable) -> Callable:
    return lambda rng, case: {name: x for make in makers for name, x in make(rng, case).items()}


def square(n: int, name: str = "", **rest) -> Case:
    return Case(name=name or f"length-{n}", q_len=n, kv_len=n, **rest)


PLAIN = [
    square(1, batch=3),
    square(77, batch=2, heads=3, kv_heads=3),
    square(257),
    square(512),
    square(1000, heads=1, kv_heads=1, head_dim=128),
    square(4608, heads=1, kv_heads=1, head_dim=128),
    square(300, "head_dim-80", head_dim=80),
    square(200, "head_dim-96", head_dim=96),
    square(300, "head_dim-256", head_dim=256, heads=1, kv_heads=1),
    square(130, "gqa-24-4", heads=24, kv_heads=4, head_dim=64),
    square(130, "gqa-9-3", heads=9, kv_heads=3, head_dim=64, options={"causal": True}),
    square(96, "gqa-32-8", batch=2, heads=32, kv_heads=8, head_dim=128, options={"causal": True}),
    Case(name="cross-32760-512", q_len=32760, kv_len=512, heads=1, kv_heads=1, head_dim=128),
    Case(name="cross-32760-257", q_len=32760, kv_len=257, heads=1, kv_heads=1, head_dim=128),
    Case(name="cross-1000-77", q_len=1000, kv_len=77),
    Case(name="cross-77-1000", q_len=77, kv_len=1000, heads=4),
    Case(name="decode", q_len=1, kv_len=1030, batch=2, heads=8, kv_heads=2, options={"causal": True}),
]

MASKED = [
    square(1000, "causal", options={"causal": True}, heads=1, kv_heads=1),
    square(4608, "causal-4608", options={"causal": True}, heads=1, kv_heads=1),
    Case(name="causal-more-keys", q_len=300, kv_len=700, options={"causal": True}),
    Case(name="causal-more-queries", q_len=700, kv_len=300, options={"causal": True}),
    Case(name="causal-offset", q_len=300, kv_len=700, options={"causal": True, "q_offset": 123}),
    Case(name="causal-offset-negative", q_len=300, kv_len=300, options={"causal": True, "q_offset": -150}),
    Case(name="causal-offset-beyond", q_len=100, kv_len=300, options={"causal": True, "q_offset": 1000}),
    Case(name="causal-all-hidden", q_len=100, kv_len=300, options={"causal": True, "q_offset": -1000}),
    square(1000, "window", options={"window": 100}, heads=1, kv_heads=1),
    square(1000, "window-causal", options={"window": 128, "causal": True}, heads=1, kv_heads=1),
    square(600, "window-1", options={"window": 1}),
    Case(name="window-offset", q_len=600, kv_len=900, options={"window": 200, "q_offset": 500}),
    Case(name="window-beyond", q_len=300, kv_len=300, options={"window": 64, "causal": True, "q_offset": 250}),
    square(600, "lengths", batch=3, arrays=lengths([600, 1, 333], [17, 600, 512])),
    square(600, "lengths-empty-rows", batch=3, arrays=lengths([0, 600, 100], [600, 0, 0])),
    square(600, "lengths-causal", batch=2, options={"causal": True}, arrays=lengths([600, 300], [500, 300])),
    square(520, "segments", batch=2, arrays=packed),
    square(520, "segments-shuffled-causal", batch=2, options={"causal": True}, arrays=shuffled),
    Case(name="segments-cross", q_len=1000, kv_len=333, arrays=packed),
    square(300, "bias-shared", batch=2, arrays=bias(False, True)),
    square(300, "bias-whole", batch=2, arrays=bias(True, True)),
    square(300, "bias-rows", batch=2, arrays=bias(True, False)),
    square(300, "bias-one", batch=2, heads=4, kv_heads=2, arrays=bias(False, False)),
    square(700, "bias-hidden", arrays=bias(False, True, hidden=0.3)),
    Case(name="bias-gqa-causal", q_len=300, kv_len=550, heads=6, options={"causal": True}, arrays=bias(False, True)),
    Case(
        name="first-keys-hidden",
        q_len=600,
        kv_len=1100,
        arrays=lambda rng, case: {"bias": jnp.zeros((1, 1, 600, 1100)).at[..., :700].set(-jnp.inf)},
    ),
    square(600, "soft-cap", options={"soft_cap": 2.0, "scale": 0.5}),
    square(300, "soft-cap-bias", options={"soft_cap": 1.0, "causal": True}, arrays=bias(False, True, hidden=0.1)),
    square(600, "large-logits", spread=30.0, options={"scale": 1.0}),
    square(300, "scale-negative", options={"scale": -0.2}),
    Case(
        name="everything",
        q_len=555,
        kv_len=801,
        batch=2,
        heads=4,
        kv_heads=2,
        options={"causal": True, "window": 300, "soft_cap": 3.0, "scale": 0.3, "q_offset": 200},
        arrays=together(lengths([555, 400], [801, 700]), packed, bias(False, True, hidden=0.05)),
    ),
]
