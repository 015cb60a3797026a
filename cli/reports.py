"""The reports of convert, verify and export, and what a training checkpoint is, as lines of text."""

import datetime
from collections.abc import Iterator
from typing import Any

from shardzoo.cli.terminal import size_text


def conversion_lines(report: Any) -> Iterator[str]:
    """What a conversion did, or would do (`convert.convert.Report`)."""
    renamed = f", prefix {report.prefix!r} taken off" if report.prefix else ""
    kept = "" if report.quantized else ", every bit kept"
    cast = f", floats cast to {report.cast}" if report.cast else kept
    cast += f", weights of blocks quantized to {report.quantized}" if report.quantized else ""
    yield f"{report.source}: {report.family}, layout {report.layout}{renamed}{cast}"
    yield (
        f"{report.tensors} tensors ({size_text(report.bytes_read)}) {'would be' if report.dry_run else 'are'}"
        f" {report.leaves} arrays ({size_text(report.bytes_on_disk)} on disk) in {report.destination}"
    )
    if report.bytes_resumed:
        yield f"{size_text(report.bytes_resumed)} of it were there from an interrupted run"
    yield _cost(report.seconds, report.peak_memory, predicted=report.dry_run)


def verification_lines(report: Any) -> Iterator[str]:
    """What was compared; differences never get here, they are errors (`convert.verify.Report`)."""
    if report.source is None:
        means = "names, sizes and metadata" if report.level == "quick" else "every value against its checksums"
        yield f"{report.checkpoint}: whole ({report.files} files, {report.leaves} arrays; {means})"
    else:
        cast = f", after the cast to {report.cast}" if report.cast else ""
        cast += " but for what was quantized" if report.rounding else ""
        yield (
            f"{report.checkpoint}: equals {report.source} bit for bit{cast}:"
            f" {len(report.tensors)} tensors, {size_text(report.bytes_compared)}"
        )
    if report.source is not None and report.rounding is not None:
        yield from _rounding_lines(report.rounding)
    yield f"in {report.seconds:.1f} s"


def _rounding_lines(rounding: Any) -> Iterator[str]:
    groups = ", ".join(f"{name} {error:.3%}" for name, error in rounding.groups.items())
    yield f"quantized to {rounding.kind}: error {rounding.error:.3%} of the weights' root mean square ({groups})"
    yield f"furthest off: {rounding.worst} by {rounding.worst_error:.3%}"


def export_lines(report: Any) -> Iterator[str]:
    """What an export wrote (`convert.export.Report`)."""
    yield (
        f"{report.checkpoint}: {len(report.files)} files ({size_text(report.bytes_written)}) in"
        f" {report.destination}, layout {report.layout}"
    )
    if report.identical:
        yield f"as they came in, bit for bit: {', '.join(report.identical)}"
    for name, reason in report.changed.items():
        yield f"changed: {name} ({reason})"
    if report.bytes_resumed:
        yield f"{size_text(report.bytes_resumed)} of it were there from an interrupted run"
    yield _cost(report.seconds, report.peak_memory, predicted=False)


def pipeline_lines(report: Any) -> Iterator[str]:
    """What was done with each component of a pipeline (`convert.pipeline.Report`)."""
    lines = {"convert": conversion_lines, "verify": verification_lines, "export": export_lines}
    for name, one in report.components.items():
        of_one = lines[type(one).__module__.rpartition(".")[2]]
        yield from (f"{name}: {line}" for line in of_one(one))
    listed = ", ".join(report.components) or "nothing new"
    yield f"{report.destination}: pipeline {report.kind}: {listed}, in {report.seconds:.1f} s"


def _cost(seconds: float, memory: int, *, predicted: bool) -> str:
    if predicted:
        return f"would take about {seconds:.1f} s and {size_text(memory)} of memory"
    return f"in {seconds:.1f} s, at most {size_text(memory)} of memory"


def training_row(step: int, manifest: Any) -> tuple[str, ...]:
    """A step of a training run as a line of a table (`checkpoints.Manifest`)."""
    training = manifest.training or {}
    when = datetime.datetime.fromtimestamp(training.get("time", 0), datetime.UTC)
    return (
        str(step),
        f"{when:%Y-%m-%d %H:%M:%S}",
        _mesh_text(training),
        str(training.get("processes", "")),
        size_text(manifest.total_bytes),
        _pairs(training.get("metrics")),
        _pairs(training.get("data")),
    )


def training_lines(manifest: Any) -> Iterator[str]:
    """What one step of a training run says beside its parameters."""
    training = manifest.training
    yield (
        f"training: step {training['step']}, saved on {_mesh_text(training)} by {training['processes']} processes,"
        f" data {_pairs(training['data'])}" + (f", {text}" if (text := _pairs(training["metrics"])) else "")
    )
    frozen = training["frozen"]
    size = sum(leaf.spec.nbytes for leaf in manifest.opt_state.values())
    yield (
        f"optimizer: {training['optimizer'] or 'no state'}, {len(manifest.opt_state)} arrays ({size_text(size)})"
        + (f"; {len(frozen)} parameters are not trained: {', '.join(frozen[:3])}" if frozen else "")
        + (", ..." if len(frozen) > 3 else "")
    )


def _mesh_text(training: dict[str, Any]) -> str:
    at_rest = sorted({axis for splits in training.get("rest", {}).values() for axis in splits.values()})
    return training.get("mesh", "") + (f" (at rest over {', '.join(at_rest)})" if at_rest else "")


def _pairs(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={inner}" for name, inner in value.items())
    return "" if value is None else str(value)
