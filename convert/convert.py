"""From a checkpoint in PyTorch's world to one of shardzoo: check, then stream, then publish."""

import contextlib
import dataclasses
import hashlib
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from shardzoo.checkpoints.grid import LeafSpec
from shardzoo.checkpoints.manifest import CARRIED, ManifestHeader, Skipped
from shardzoo.checkpoints.manifest import Source as SourceRecord
from shardzoo.checkpoints.staging import check_destination
from shardzoo.checkpoints.store import storage_error, writable_folder
from shardzoo.checkpoints.writer import CheckpointWriter, place_leaves, stored_bytes
from shardzoo.convert.families import rules_of
from shardzoo.convert.memory import few_arenas, peak_memory
from shardzoo.convert.plan import Plan, check_ties, make_plan
from shardzoo.convert.replacing import check_place, has_manifest, replacing
from shardzoo.convert.source import Source, open_source, row_blocks
from shardzoo.convert.stopping import Interrupt, held_back
from shardzoo.convert.stream import Stream, least_budget
from shardzoo.errors import InputError
from shardzoo.progress import Progress
from shardzoo.zoo.families import config_to_json

BUDGET = 128 << 20  # bytes in flight, unless the caller says otherwise
PROBE_BYTES = 32 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What a conversion did, or with `dry_run` would do.

    Attributes:
        source, destination: paths as given.
        family, layout, prefix: what the source was recognised as.
        cast: dtype that parameters were cast to, or None.
        quantized: what weights were quantized to, or None.
        leaves: number of arrays written, carried ones included.
        tensors: number of source tensors stored.
        files: source file -> SHA-256 (None in a dry run).
        bytes_read, bytes_written: of values.
        bytes_resumed: of `bytes_written`, what an earlier interrupted run had stored.
        bytes_on_disk: of the data files, with checksums.
        seconds: time taken, or predicted from a short read and write.
        peak_memory: most bytes resident in this process so far, or predicted.
        aliases, carried, skipped: tensors stored once under another key; stored but not run; not stored.
        notes: remarks for the user.
    """

    source: str
    destination: str
    dry_run: bool
    family: str
    layout: str
    prefix: str
    cast: str | None
    quantized: str | None
    leaves: int
    tensors: int
    files: dict[str, str | None]
    bytes_read: int
    bytes_written: int
    bytes_resumed: int
    bytes_on_disk: int
    seconds: float
    peak_memory: int
    aliases: dict[str, str]
    carried: dict[str, str]
    skipped: dict[str, str]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def plan_conversion(
    src: str | Path,
    *,
    family: str | None = None,
    component: str | None = None,
    dtype: str | None = None,
    config: str | Path | None = None,
    prefix: str | None = None,
    variant: str | None = None,
    select: str | None = None,
    quantize: str | None = None,
) -> Plan:
    """What `convert` with these arguments would write; reads headers only.

    Raises:
        InputError: everything about the source that stands in the way, in one message.
    """
    reading: dict[str, Any] = {"family": family, "component": component, "dtype": dtype, "quantize": quantize}
    with open_source(src, variant=variant, select=select) as source:
        return make_plan(source, config=config, prefix=prefix, **reading)


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    family: str | None = None,
    component: str | None = None,
    dtype: str | None = None,
    config: str | Path | None = None,
    prefix: str | None = None,
    variant: str | None = None,
    select: str | None = None,
    quantize: str | None = None,
    memory_budget: int | None = None,
    dry_run: bool = False,
    resume: bool = True,
    overwrite: bool = False,
    sync: bool = True,
    progress: Progress | None = None,
) -> Report:
    """Converts a folder, weight file or index of weights to a checkpoint at `dst`.

    Every tensor keeps its bits unless `dtype` or `quantize` says otherwise. Stopped at any point it leaves nothing that
    looks whole; run again with the same arguments it carries on.

    Args:
        src: what to convert.
        dst: where the checkpoint will be.
        family, component, dtype, config, prefix, quantize: see `make_plan`.
        variant, select: see `open_source`.
        memory_budget: bytes of values in flight and of what they are encoded in (default 128 MiB, or what the
            largest block needs if that is more); peak memory is about this and the interpreter.
        dry_run: check everything and predict time and memory, but leave nothing at the destination: its speed is
            measured by a nameless file, no longer than the checkpoint and gone at once.
        resume: carry on an interrupted run of the same plan; False starts again.
        overwrite: replace a checkpoint at `dst`, once the new one is whole.
        sync: flush files to the device, so that a published checkpoint survives loss of power.
        progress: told of each block.

    Raises:
        InputError: everything wrong with the source in one message, before anything is written; a destination that
            exists, is full or not writable.
    """
    began = time.perf_counter()
    few_arenas()
    target = Path(os.path.abspath(dst))
    check_place(target, src)
    reading: dict[str, Any] = {"family": family, "component": component, "dtype": dtype, "quantize": quantize}
    with held_back() as interrupt, open_source(src, variant=variant, select=select) as source:
        plan = make_plan(source, config=config, prefix=prefix, **reading)
        if not overwrite or not has_manifest(target):
            check_destination(target)
        interrupt.check()
        budget = _checked_budget(memory_budget, source, plan)
        check_ties(source, plan)
        if dry_run:
            return _predict(source, plan, target, budget, source=str(src), destination=str(dst))
        run = _Run(source, plan, budget, resume, sync, progress, config, interrupt)
        with replacing(target, has_manifest) if overwrite else contextlib.nullcontext(target) as place:
            try:
                stream, on_disk = run.write(place)
            except OSError as error:
                raise storage_error(str(target), error, target.parent) from error
        files = {file.path: stream.digests[i] for i, file in enumerate(source.files)}
    return _report(
        plan,
        source=str(src),
        destination=str(dst),
        dry_run=False,
        files=files,
        bytes_resumed=stream.resumed,
        bytes_on_disk=on_disk,
        seconds=time.perf_counter() - began,
        peak_memory=peak_memory(),
    )


def _checked_budget(memory_budget: int | None, source: Source, plan: Plan) -> int:
    grids = {path: grid for path, (_, _, grid) in place_leaves(*_specs(plan)).items()}
    least = least_budget(source, plan, grids)
    if memory_budget is not None and memory_budget < max(least, 1):
        raise InputError(
            f"memory_budget={memory_budget} is below the {least} bytes that the largest block needs: raise it"
        )
    return max(BUDGET, least) if memory_budget is None else memory_budget


@dataclasses.dataclass(frozen=True)
class _Run:
    """The writing part of a conversion, with what it needs."""

    source: Source
    plan: Plan
    budget: int
    resume: bool
    sync: bool
    progress: Progress | None
    config: str | Path | None
    interrupt: Interrupt

    def write(self, place: Path) -> tuple[Stream, int]:
        """Streams and publishes; the stream, and the bytes of the data files."""
        source, plan = self.source, self.plan
        leaves, carried = _specs(plan)
        assets = _assets(source, self.config)
        with CheckpointWriter(
            place,
            _header(source, plan),
            leaves,
            _identity(source, plan, assets),
            carried=carried,
            assets=assets,
            budget=self.budget,
            sync=self.sync,
            restart=not self.resume,
        ) as writer:
            free = max(self.budget - writer.held, self.budget // 2)
            stream = Stream(source, plan, writer, budget=free, progress=self.progress, interrupt=self.interrupt)
            stream.run()
            writer.publish(_sources(source, stream.digests))
            return stream, writer.nbytes


def _specs(plan: Plan) -> tuple[dict[str, LeafSpec], dict[str, LeafSpec]]:
    """What the writer is to store: parameters by path, carried tensors by key."""
    start = f"{CARRIED}/"
    leaves = {path: leaf.spec for path, leaf in plan.leaves.items() if not path.startswith(start)}
    carried = {path.removeprefix(start): leaf.spec for path, leaf in plan.leaves.items() if path.startswith(start)}
    return leaves, carried


def _assets(source: Source, config: str | Path | None) -> dict[str, Path | bytes]:
    """Config, index and tokenizer files, as they stand."""
    assets: dict[str, Path | bytes] = {path.name: path for path in source.extras}
    if config is not None:
        assets["config.json"] = Path(config)
    elif source.config_text is not None:
        assets["config.json"] = source.config_text.encode()
    if source.index_name and source.index_text is not None:
        assets[source.index_name] = source.index_text.encode()
    return assets


def _header(source: Source, plan: Plan) -> ManifestHeader:
    return ManifestHeader(
        family=plan.family,
        config=config_to_json(plan.config),
        component=rules_of(plan.family).part,
        sources=_sources(source, {}),
        skipped=tuple(Skipped(key=key, reason=reason) for key, reason in plan.skipped.items()),
        aliases=plan.aliases,
        detail={
            "layout": plan.layout,
            "prefix": plan.prefix,
            "carried": dict(plan.carried),
            "index": source.index_name,
            "hub": dataclasses.asdict(source.hub) if source.hub else None,
            "tensors": _tensor_table(source),
            **({"quantized": plan.quantized} if plan.quantized else {}),
        },
    )


def _tensor_table(source: Source) -> dict[str, list[Any]]:
    """Key -> [file, dtype, shape] in the order of the files: what export writes back."""
    return {key: [info.file, info.dtype.name, list(info.shape)] for key, info in source.tensors.items()}


def _sources(source: Source, digests: dict[int, str]) -> tuple[SourceRecord, ...]:
    return tuple(
        SourceRecord(
            name=file.path,
            kind=file.kind,
            size=file.size,
            sha256=digests.get(i),
            header=file.header.decode() if file.kind == "safetensors" else None,
            detail={
                **({"wrapper": list(file.wrapper)} if file.wrapper else {}),
                **({"scaled": file.scaled} if file.scaled else {}),
            },
        )
        for i, file in enumerate(source.files)
    )


def _identity(source: Source, plan: Plan, assets: dict[str, Path | bytes]) -> str:
    """What an interrupted run must have in common with this one to be carried on."""
    digest = hashlib.sha256(plan.digest().encode())
    for file in source.files:
        digest.update(
            repr((file.path, file.wrapper, file.size, file.mtime_ns, hashlib.sha256(file.header).hexdigest())).encode()
        )
    for name, content in sorted(assets.items()):
        data = content if isinstance(content, bytes) else content.read_bytes()
        digest.update(repr((name, hashlib.sha256(data).hexdigest())).encode())
    return digest.hexdigest()


def _report(plan: Plan, **rest: Any) -> Report:
    stored = [key for key in plan.tensors if key not in plan.skipped and key not in plan.aliases]
    return Report(
        family=plan.family,
        layout=plan.layout,
        prefix=plan.prefix,
        cast=plan.cast.name if plan.cast else None,
        quantized=plan.quantized,
        leaves=len(plan.leaves),
        tensors=len(stored),
        bytes_read=plan.bytes_read,
        bytes_written=plan.bytes_written,
        aliases=dict(plan.aliases),
        carried=dict(plan.carried),
        skipped=dict(plan.skipped),
        notes=plan.notes,
        **rest,
    )


def _predict(opened: Source, plan: Plan, target: Path, budget: int, **paths: str) -> Report:
    on_disk = stored_bytes(place_leaves(*_specs(plan)))
    place = writable_folder(target)
    free = shutil.disk_usage(place).free
    if free < on_disk + on_disk // 50:
        raise InputError(
            f"{target}: needs {on_disk:,} bytes, {free:,} are free at {place}: free some, or choose another destination"
        )
    reading, writing = _read_rate(opened), _write_rate(place, min(PROBE_BYTES, on_disk))
    return _report(
        plan,
        **paths,
        dry_run=True,
        files={file.path: None for file in opened.files},
        bytes_resumed=0,
        bytes_on_disk=on_disk,
        seconds=sum(file.size for file in opened.files) / reading + on_disk / writing,
        peak_memory=peak_memory() + min(budget, plan.bytes_read + plan.bytes_written),
    )


def _read_rate(source: Source) -> float:
    """Bytes a second of reading and digesting, from the first part of the largest tensor."""
    largest = max(source.tensors.values(), key=lambda info: info.nbytes)
    began, read = time.perf_counter(), 0
    for rows in row_blocks(largest, 8 << 20):
        data = source.read(largest.key, rows).reshape(-1).view(np.uint8)
        hashlib.sha256(data.data)
        read += data.nbytes
        source.release(largest.key, rows)
        if read >= PROBE_BYTES:
            break
    return max(read, 1) / (time.perf_counter() - began)


def _write_rate(folder: Path, nbytes: int) -> float:
    """Bytes a second of writing to the device, from a file that is gone at once."""
    data = bytes(nbytes)
    began = time.perf_counter()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise InputError(f"{folder}: cannot be written to ({error.strerror}): choose another destination") from None
    return len(data) / (time.perf_counter() - began)
