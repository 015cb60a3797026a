"""What `measure` does: runs a model's pass where it is, and puts what was measured beside what the audit predicts."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardzoo.cli import chips, memory, prediction, targets
from shardzoo.cli.devices import start_mesh
from shardzoo.cli.terminal import say, say_json, say_table, size_text, working
from shardzoo.cli.verdicts import device_bytes
from shardzoo.zoo import layout
from shardzoo.zoo.costs import costs_by
from shardzoo.zoo.families import TraceSizes, find_family
from shardzoo.zoo.liveness import held_by
from shardzoo.zoo.measure import Measured, measure, reached
from shardzoo.zoo.mesh import Degrees

SMALL = {"tokens": 512, "frames": 5, "height": 256, "width": 256}  # sizes that machines without accelerators run too
FILL = 0.02  # of weights and inputs: what is measured does not depend on them


def run(
    target: str,
    wanted: Degrees,
    *,
    batch: int,
    given: Mapping[str, int],
    dtype: np.dtype,
    steps: int,
    folder: Path | None,
    json: bool,
    **reading: Any,
) -> None:
    """Measures the forward pass of a model with made-up weights, and prints it beside the prediction.

    Sizes of the inputs are those `given`, else `SMALL`.

    Raises:
        InputError: the mesh does not fit; the family has no forward pass to trace; its inputs have no such size.
    """
    found = targets.find_target(target, **reading)
    prediction.check_sizes(target, [found], tuple(given))
    sizes = TraceSizes(batch=batch, **{**SMALL, **given})
    declared = layout.astype(found.declared, dtype)
    layout.audit(declared, wanted)
    family, degrees = find_family(found.family), layout.with_kv(declared, wanted)
    mesh = start_mesh(degrees)
    function, arguments = memory.tracing(family)(declared, mesh, sizes)
    with working("measuring"):
        predicted = _predict(family, declared, degrees, sizes)
        model = _filled(layout.abstract(declared, mesh))
        inputs = jax.tree.map(lambda x: jnp.full(x.shape, FILL, x.dtype), arguments)
        measured = measure(
            function,
            model,
            *inputs,
            steps=steps,
            flops=predicted["flops"],
            peak=predicted["peak"],
            folder=folder,
        )
    if json:
        say_json({"target": target, "mesh": str(degrees), "measured": measured.to_json(), "predicted": predicted})
        return
    say(f"{target} on {degrees}, {jax.devices()[0].device_kind}: {len(measured.seconds)} steps")
    say_table(("", "measured", "predicted"), _rows(measured, predicted))


def _filled(abstract: Any) -> Any:
    """A live model of one number, made where it lies."""
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    return jax.jit(
        lambda: jax.tree.map(lambda x: jnp.full(x.shape, FILL, x.dtype), abstract), out_shardings=shardings
    )()


def _predict(family: Any, declared: Any, degrees: Degrees, sizes: TraceSizes) -> dict[str, Any]:
    """The audit's figures: at the chip's published speeds where it is one of ours, else at what a product reaches."""
    device = jax.devices()[0]
    chip = next((chip.device for chip in chips.CHIPS.values() if chip.kind == device.device_kind), None)
    kind = chips.CHIPS["v5e"].kind if chip is None else chip.kind
    traced = memory.trace(family, declared, prediction.abstract_mesh(degrees, kind), sizes)
    costs = costs_by(traced.jaxpr, degrees.sizes, *traced.arguments)
    held = held_by(traced.jaxpr, tiled=chip is not None)
    peak = reached(device) if chip is None else chip.flops
    sending = sum(c.link_bytes for c in costs.collectives) / (prediction.RINGS * chip.link) if chip else None
    return {
        "flops": costs.flops,
        "peak": peak,
        "computing": costs.passes / peak if chip else costs.flops / peak,
        "collectives": sending,
        "sent_bytes": costs.sent_bytes,
        "memory": round(device_bytes(declared, degrees)) + held.peak,
    }


def _rows(measured: Measured, predicted: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """The figures, and of those that the audit has its own."""
    sending, computing = predicted["collectives"], predicted["computing"]
    links = f"{size_text(predicted['sent_bytes'])} sent" if sending is None else f"{1000 * sending:.2f} ms"
    known = {
        "step": f"at least {1000 * (computing + (sending or 0.0)):.2f} ms",
        "computing": f"{1000 * computing:.2f} ms",
        "collectives": links,
        "memory": f"{predicted['memory'] / 2**20:.1f} MiB a device",
    }
    yield from ((name, value, known.get(name, "")) for name, value in measured.rows())
