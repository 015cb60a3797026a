"""What `audit` does: each target's verdicts on meshes, what chips would hold and take, and what the compiler says."""

import contextlib
import dataclasses
import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardzoo.cli import targets
from shardzoo.cli.dimensions import Dimensions, describe
from shardzoo.cli.interrupts import uninterrupted
from shardzoo.cli.terminal import count_text, folded, note, say, say_json, size_text, working
from shardzoo.cli.verdicts import Verdict, judge, total
from shardzoo.errors import InputError, fail_if
from shardzoo.zoo import layout
from shardzoo.zoo.families import TraceSizes, find_family
from shardzoo.zoo.mesh import Degrees

COLLECT_AFTER = 500_000  # objects, a mesh's trace or two
STAGES = {  # what a pipeline does with a component of this family, in its order
    "t5": "text encode",
    "clip-text": "text encode",
    "decoder": "text encode",
    "qwen2.5-vl-vision": "image encode",
    "clip-vision": "image encode",
    "flux": "denoise step",
    "flux2": "denoise step",
    "qwen-image": "denoise step",
    "wan": "denoise step",
    "image-vae": "decode",
    "wan-vae": "decode",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ahead:
    """What to predict and compile ahead of time.

    Attributes:
        topology: the slice to compile for, as libtpu names it.
        chips: the slice to predict on, as users name it.
        compile: whether to compile for those chips too.
        effort: of the compiler (`topology.EFFORTS`); None is chosen by the program.
        sizes: of the inputs.
        given: names of the sizes that the user gave.
        dtype: of the weights.
        train: whether gradients are taken, and AdamW's state is held.
        remat: what of a block is kept for the backward pass (`zoo.remat`).
        at_rest: the axis that weights are split over while they are not used.
        new: tokens to generate.
        microbatches: that a pipeline of several stages works on, to say how long they wait; None is one for each stage,
            as far as rows go, which is what is traced.
    """

    topology: str | None
    chips: str | None
    sizes: TraceSizes
    given: tuple[str, ...] = ()
    dtype: np.dtype | None
    compile: bool = False
    effort: str | None = None
    train: bool = False
    remat: str | bool = False
    at_rest: str | None = None
    new: int | None = None
    microbatches: int | None = None


def audit(
    target: str,
    meshes: Sequence[Degrees],
    *,
    component: list[str] | None,
    ahead: Ahead,
    quantize: str | None,
    html: Path | None,
    json: bool,
    **reading: Any,
) -> bool:
    """Prints the verdict on each mesh, for each component of a pipeline; whether all of them fit.

    With chips also the ranking of these meshes, or of all; it is then whether one of them fits the chips' memory.
    """
    found = [_quantized(one, quantize) for one in targets.find_targets(target, component, **reading)]
    if ahead.given:
        with uninterrupted():
            from shardzoo.cli.prediction import check_sizes
        check_sizes(target, found, ahead.given)
    judged = [_Judged(one, [judge(one.declared, degrees) for degrees in dict.fromkeys(meshes)], ahead) for one in found]
    with _seldom_collected():
        for one in judged:
            one.look()
    if html is not None:
        with uninterrupted():
            from shardzoo.cli import page
        page.write(html, [one.to_json() for one in judged], target)
    if json and len(judged) == 1:
        say_json(judged[0].to_json())
    elif json:
        say_json({"target": target, "components": [one.to_json() for one in judged]})
    else:
        say("\n".join(folded(line) for one in judged for line in one.lines()))
        say_stages(judged)
    fit = all(verdict.fits for one in judged for verdict in one.verdicts)
    return fit and all(one.ranking is None or one.ranking.fits for one in judged)


@contextlib.contextmanager
def _seldom_collected() -> Iterator[None]:
    """Tracing makes objects by the hundred thousand and drops few: looking through all of them for cycles takes a third
    of the time, so it is done once in a while, and leaves out what was there before."""
    usual = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()


def _quantized(target: targets.Target, kind: str | None) -> targets.Target:
    """The target with its weights quantized, where it has some that can be."""
    if kind is None:
        return target
    with uninterrupted():
        from shardzoo.zoo import quantize

    there = quantize.kind_of(target.declared)
    if there not in (None, kind):
        raise InputError(f"{target.name}: quantize={kind!r}, and its weights are {there} already: leave quantize out")
    if not quantize.quantizable(target.declared, kind):
        note(f"note: {target.name}: has no weights that are quantized")
        return target
    return dataclasses.replace(target, declared=quantize.declare(target.declared, kind))


@dataclasses.dataclass
class _Judged:
    """A target, the verdict on each mesh, and what is predicted and compiled of those that fit.

    `memory` and `generation` are told for the meshes that were given, `predicted` on the chips that were named.
    """

    target: targets.Target
    verdicts: list[Verdict]
    ahead: Ahead
    compiled: dict[Degrees, Any] = dataclasses.field(default_factory=dict)
    memory: dict[Degrees, Any] = dataclasses.field(default_factory=dict)
    generation: dict[Degrees, Any] = dataclasses.field(default_factory=dict)
    ranking: Any = None

    @property
    def declared(self) -> Any:
        """The declaration in the dtype that is predicted and compiled with."""
        dtype = self.ahead.dtype
        return layout.astype(self.target.declared, dtype)

    def at_rest(self, degrees: Degrees) -> Any:
        """The same, split at rest on a mesh as was asked for."""
        axis = self.ahead.at_rest
        return self.declared if axis is None else layout.split_at_rest(self.declared, axis, degrees)

    @property
    def looked_at(self) -> list[Degrees]:
        """The meshes that are told about in full: those given that fit, else the best of the chips."""
        if self.verdicts:
            return [verdict.degrees for verdict in self.verdicts if verdict.fits]
        best = None if self.ranking is None else self.ranking.best
        return [] if best is None else [best.degrees]

    def look(self) -> None:
        """Predicts and compiles what was asked for."""
        family = find_family(self.target.family)
        if self.ahead.chips is not None:
            self.ranking = self._rank(family)
        elif family.trace is not None:
            with working("tracing"):
                self.memory = {degrees: self._memory(family, degrees) for degrees in self.looked_at}
        if self.ahead.new is not None:
            with working("tracing"):
                self.generation = {degrees: self._generation(family, degrees) for degrees in self.looked_at}
        self.compiled = self._compile(family)

    @property
    def _passing(self) -> dict[str, Any]:
        return {"train": self.ahead.train, "remat": self.ahead.remat}

    def _rank(self, family: Any) -> Any:
        with uninterrupted():
            from shardzoo.cli import chips, prediction, remedies

        where, given = chips.parse(self.ahead.chips or ""), [verdict.degrees for verdict in self.verdicts]
        at_rest = None if self.ahead.at_rest is None else self.at_rest
        with working("tracing"):
            ranking = prediction.rank(
                family, self.declared, where, self.ahead.sizes, given, at_rest=at_rest, **self._passing
            )
            if ranking.fits:
                return ranking
            attempt = remedies.Attempt(
                family=family,
                declared=self.declared,
                where=where,
                sizes=self.ahead.sizes,
                at_rest=self.ahead.at_rest,
                **self._passing,
            )
            nearest = None if ranking.best is None else ranking.best.degrees
            return dataclasses.replace(ranking, remedies=remedies.remedies(attempt, nearest))

    def _memory(self, family: Any, degrees: Degrees) -> Any:
        with uninterrupted():
            from shardzoo.cli import chips, memory, prediction

        mesh = prediction.abstract_mesh(degrees, chips.CHIPS["v5e"].kind)
        declared = self.at_rest(degrees)
        traced = memory.trace(family, declared, mesh, self.ahead.sizes, **self._passing)
        return memory.memory_of(declared, degrees, traced, train=self.ahead.train)

    def _generation(self, family: Any, degrees: Degrees) -> Any:
        with uninterrupted():
            from shardzoo.cli import chips, memory, prediction

        where = chips.CHIPS["v5e"] if self.ranking is None else self.ranking.where.chip
        mesh = prediction.abstract_mesh(degrees, where.kind)
        return memory.generation_of(family, self.at_rest(degrees), mesh, self.ahead.sizes, self.ahead.new or 1)

    def _compile(self, family: Any) -> dict[Degrees, Any]:
        """For each mesh that is looked at, what the compiler says of it; nothing where no slice was named for it."""
        name = self.ahead.topology
        if name is None and self.ahead.compile and self.ranking is not None:
            name = self.ranking.where.topology
        if name is None:
            return {}
        with uninterrupted():
            from shardzoo.cli import topology

        devices = topology.topology_devices(name)
        given = [verdict.degrees for verdict in self.verdicts] or self.looked_at
        wrong = [f"mesh ({degrees}) has {degrees.devices}" for degrees in given if degrees.devices != len(devices)]
        fail_if(wrong, f"topology={name!r} has {len(devices)} devices, so must every mesh")
        with working("compiling"):
            return {
                degrees: topology.compile_forward(
                    family, self.at_rest(degrees), degrees, devices, self.ahead.sizes, None, self.ahead.effort
                )
                for degrees in self.looked_at
            }

    def prediction(self, degrees: Degrees) -> Any:
        """What is predicted of a mesh on the chips, or None."""
        made = () if self.ranking is None else self.ranking.predictions
        return next((one for one in made if one.degrees == degrees), None)

    def described(self, degrees: Degrees) -> Dimensions:
        rows = -(-self.ahead.sizes.batch // degrees.data)
        return describe(self.declared, degrees, self.ahead.microbatches or min(degrees.pipe, rows))

    def to_json(self) -> dict[str, Any]:
        count, size = total(self.target.declared)
        looked = [v.degrees for v in self.verdicts] or self.looked_at
        return {
            "target": self.target.name,
            "kind": self.target.kind,
            "family": self.target.family,
            "parameters": count,
            "parameter_bytes": size,
            "meshes": [v.to_json() | self._found(v.degrees) for v in self.verdicts],
            "best": None if self.verdicts or not looked else {"mesh": str(looked[0])} | self._found(looked[0]),
            "ranking": self.ranking and self.ranking.to_json(),
        }

    def _found(self, degrees: Degrees) -> dict[str, Any]:
        found = {"memory": self.memory, "generation": self.generation, "compiled": self.compiled}
        return self.described(degrees).to_json() | {
            name: None if of.get(degrees) is None else of[degrees].to_json() for name, of in found.items()
        }

    def lines(self) -> Iterator[str]:
        """The verdicts as text."""
        one, (count, size) = self.target, total(self.target.declared)
        yield f"{one.name} ({one.family}, {one.kind}): {count_text(count)} parameters, {size_text(size)}"
        for verdict in self.verdicts:
            yield from verdict.lines()
            yield from self._mesh_lines(verdict.degrees)
        yield from self.ranking.lines() if self.ranking is not None else ()
        for degrees in () if self.verdicts else self.looked_at:
            yield f"{degrees}:"
            yield from self._mesh_lines(degrees)

    def _mesh_lines(self, degrees: Degrees) -> Iterator[str]:
        yield from self.described(degrees).lines()
        prediction = self.prediction(degrees)
        held = self.memory.get(degrees) if prediction is None else prediction.memory
        if prediction is not None:
            yield from prediction.lines()
        elif held is not None:
            yield from held.lines(None)
        if degrees in self.generation and held is not None:
            yield from self.generation[degrees].lines(held.parameters)
        if degrees in self.compiled:
            yield from self.compiled[degrees].lines()
            yield from () if held is None else _beside(held.program, self.compiled[degrees])


def _beside(ours: int, compiled: Any) -> Iterator[str]:
    """Ours and the compiler's, and how far they are apart, as `topology.Compiled.off` says it."""
    total, peak = size_text(compiled.total_bytes), size_text(compiled.peak_bytes)
    said = (
        f"{peak} alive at the worst moment, {total} set aside"
        if compiled.peak_bytes <= compiled.total_bytes
        else f"{total}, {peak} with what it keeps on chip"
    )
    yield f"  by our arithmetic {size_text(ours)}, by the compiler {said}: {compiled.off(ours):+.1%}"


def say_stages(judged: Sequence[_Judged]) -> None:
    """For a pipeline, what each of its stages holds: one component at a time is on the devices."""
    rows = []
    for one in judged:
        for degrees in one.looked_at:
            prediction = one.prediction(degrees)
            held = one.memory.get(degrees) if prediction is None else prediction.memory
            if held is not None:
                stage = STAGES.get(one.target.family, one.target.family)
                rows.append((held.total, f"  {stage:14} {one.target.name.rpartition(' ')[2]:24} {degrees!s:24}"))
    if len(judged) > 1 and rows:
        say("stages, one after another on the same chips:")
        say("\n".join(f"{row} {size_text(held):>10}" for held, row in rows))
        most, row = max(rows)
        say(f"  most: {size_text(most)} a chip, {row.split('  ')[1].strip()}")
