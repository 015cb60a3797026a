"""Scheduled bundles per token and value head of the TPU kernels of the gated delta rule and of two others, in one run.

    python benchmarks/gated_delta_tpu.py [--chips v5e v6e] [--ejkernel DIR] [--tpu-inference DIR]

Needs libtpu (`pip install libtpu`), no TPU: see `tpu_static`. bfloat16, 48 value heads and 16 key heads of 128, 4,096
tokens. The others are optional and measured where they are given:

    pip install --no-deps --target DIR ejkernel==0.0.80.3
    git clone https://github.com/vllm-project/tpu-inference DIR    (measured at b8692ff)

What is counted: the bundles of a grid step of each Pallas kernel over the tokens and heads that it works on. Of
ejkernel that is the work within chunks alone; the recurrence over chunks, a scan of XLA operations, is left out, which
favours it (its public function does not call these kernels for more than one token; the benchmark does, and passes
each value head keys of its own, as its interface wants). tpu-inference's kernel also does the convolution, the
normalisation of queries and keys and the gates. Of ours the backward pass is both kernels: states and gradients.
The others are taken at the best of several chunk sizes.
"""

import argparse
import functools
import importlib
import os
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import jax
import jax.numpy as jnp
import tpu_static

from shardzoo.kernels.gated_delta import tpu_backward, tpu_forward, tpu_layout
from shardzoo.kernels.gated_delta.options import Call

SEQ, KEY_HEADS, HEADS, DIM = 4096, 16, 48, 128
CHIPS = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}


def array(*shape: int, dtype: jnp.dtype = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


line = functools.partial(array, dtype=jnp.float32)


@dataclass(frozen=True, kw_only=True)
class Work:
    """A function whose kernels with these names are counted; `tokens` is the tokens times heads of a grid step."""

    function: Callable
    arguments: list[jax.ShapeDtypeStruct]
    names: tuple[str, ...]
    tokens: int
    note: str


def ours(backward: bool) -> Work:
    """This package's kernels as they run by default."""
    rows = [array(1, SEQ, KEY_HEADS, DIM)] * 2 + [array(1, SEQ, KEY_HEADS, HEADS // KEY_HEADS, DIM)]
    gates = [line(1, SEQ, KEY_HEADS, HEADS // KEY_HEADS)] * 2
    call = Call(*rows, *gates, line(1, KEY_HEADS, HEADS // KEY_HEADS, DIM, DIM))
    plan = tpu_layout.plan_of("backward" if backward else "forward", call, DIM**-0.5)
    arrays = jax.eval_shape(functools.partial(tpu_layout.arrays_of, plan), call)

    def forward(*x: jax.Array) -> tuple:
        return tpu_forward.run(plan, tpu_layout.Arrays(*x), jnp.bfloat16)

    def gradients(d_out: jax.Array, d_last: jax.Array, *x: jax.Array) -> tuple:
        given = tpu_layout.Arrays(*x)
        return tpu_backward.run(plan, given, tpu_backward.states(plan, given), d_out, d_last, (jnp.bfloat16,) * 3)

    return Work(
        function=gradients if backward else forward,
        arguments=[arrays.v, arrays.state, *arrays] if backward else [*arrays],
        names=("gated_delta_states", "gated_delta_backward") if backward else ("gated_delta_forward",),
        tokens=plan.tokens * plan.heads,
        note=f"{plan.tokens} tokens of {plan.heads} heads a step",
    )


def ejkernel(folder: str, chunk: int, backward: bool) -> Work:
    """ejkernel's chunk kernels, forward (for inference) or backward."""
    inside = "ejkernel.kernels._pallas.tpu.gated_delta_rule._pallas_impl_fwd"
    bare_import(folder, "ejkernel.kernels._xla.gated_delta_rule._xla_impl_fwd")
    rule = bare_import(folder, inside)._chunk_gdr_fwd_pallas_chunk

    def forward(*x: jax.Array) -> jax.Array:
        return rule(*x, chunk, None, False)[0]

    def gradients(*x: jax.Array) -> tuple:
        return jax.grad(lambda *x: forward(*x).astype(jnp.float32).sum(), tuple(range(5)))(*x)

    return Work(
        function=gradients if backward else forward,
        arguments=[array(1, HEADS, SEQ, DIM)] * 3 + [line(1, HEADS, SEQ)] * 2,
        names=("closed_call",) if backward else ("forward",),
        tokens=chunk,
        note=f"chunk {chunk}",
    )


def tpu_inference(folder: str, chunk: int) -> Work:
    """tpu-inference's fused kernel for sequences of many tokens."""
    fused = bare_import(folder, "tpu_inference.kernels.gdn.v3.wrapper").fused_conv1d_gdn
    width, taps, slots = (2 * KEY_HEADS + HEADS) * DIM, 4, 3
    sizes = dict(n_kq=KEY_HEADS, n_v=HEADS, d_k=DIM, d_v=DIM, kernel_size=taps, mixed_tile_size=chunk)

    def forward(qkv, b, a, conv, state, weight, a_log, dt_bias, starts, slot, kinds, lengths):
        return fused(
            qkv, b, a, conv, state, weight, None, a_log, dt_bias, starts, slot, kinds, lengths, **sizes
        )  # fmt: skip

    integers = functools.partial(array, dtype=jnp.int32)
    per_head = [array(SEQ, HEADS)] * 2
    states = [array(slots, taps - 1, width), line(slots, HEADS, DIM, DIM)]
    weights = [array(width, 1, taps), line(HEADS), line(HEADS)]
    return Work(
        function=forward,
        arguments=[
            array(SEQ, width), *per_head, *states, *weights, integers(3), integers(2), integers(3), integers(2)
        ],
        names=("fused_conv1d_gdn_per_seq",),
        tokens=chunk * HEADS,
        note=f"chunk {chunk}, with convolution, norms and gates",
    )  # fmt: skip


def bare_import(folder: str, name: str) -> types.ModuleType:
    """A module of a package without the code of the packages around it, which asks for much that is not needed."""
    parts = name.split(".")
    for n in range(1, len(parts)):
        package = ".".join(parts[:n])
        if package not in sys.modules:
            sys.modules[package] = types.ModuleType(package)
            sys.modules[package].__path__ = [os.path.join(folder, *parts[:n])]
    return importlib.import_module(name)


def measure(chip: str, work: Work) -> tuple[float, str]:
    """Bundles per token and head, and those of each kernel's step."""
    found = tpu_static.compile_for(CHIPS[chip], work.function, work.arguments)
    kernels = [k for k in found if k.name.split(".")[0] in work.names]
    if len(kernels) != len(work.names):
        raise RuntimeError(f"kernels {work.names} are not all among {[k.name for k in found]}")
    bundles = [sum(k.matrix) + k.every for k in kernels]
    listed = ", ".join(f"{k.name.split('.')[0]} {n}" for k, n in zip(kernels, bundles, strict=True))
    return sum(bundles) / work.tokens, f"{work.note}: {listed}"


def others(given: argparse.Namespace, backward: bool) -> dict[str, list[Callable[[], Work]]]:
    """The kernels that are given, each at several sizes."""
    found = {}
    if given.ejkernel:
        sizes = given.chunks or (64, 128)
        found["ejkernel"] = [functools.partial(ejkernel, given.ejkernel, n, backward) for n in sizes]
    if given.tpu_inference and not backward:
        found["tpu-inference"] = [
            functools.partial(tpu_inference, given.tpu_inference, n) for n in given.chunks or (64,)
        ]
    return found


def chip_info(chip: str) -> object:
    """What a kernel is told of the chip that it is compiled for; there is none here to ask."""
    from jax._src.pallas.mosaic import tpu_info

    version = {"v4": "TPU_V4", "v5e": "TPU_V5E", "v5p": "TPU_V5P", "v6e": "TPU_V6E"}[chip]
    return tpu_info.get_tpu_info_for_chip(tpu_info.ChipVersion[version], 1)


def lines(chip: str, given: argparse.Namespace) -> Iterator[str]:
    """A row for each kernel, with what share of the best other one's bundles ours takes."""
    for name, backward in (("forward", False), ("backward", True)):
        figure, note = measure(chip, ours(backward))
        yield f"{chip:5}{name:10}{'ours':14}{figure:8.2f}  {note}"
        best = []
        for other, choices in others(given, backward).items():
            measured, note = min(measure(chip, make()) for make in choices)
            best.append(measured)
            yield f"{chip:5}{name:10}{other:14}{measured:8.2f}  {note}"
        if best:
            yield f"{chip:5}{name:10}ours are {figure / min(best):.2f} of the better one's"


def main() -> None:
    """Prints the table, a row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", choices=list(CHIPS), default=["v5e", "v6e"])
    parser.add_argument("--ejkernel", help="the folder that ejkernel is installed in")
    parser.add_argument("--tpu-inference", help="a checkout of tpu-inference")
    parser.add_argument("--chunks", nargs="+", type=int, help="chunk sizes of the others")
    given = parser.parse_args()
    for chip in given.chips:
        with mock.patch("jax.experimental.pallas.tpu.get_tpu_info", functools.partial(chip_info, chip)):
            for row in lines(chip, given):
                print(row, flush=True)
    tpu_static.clean()


if __name__ == "__main__":
    main()
