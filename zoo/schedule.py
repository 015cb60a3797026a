"""Schedules of a pipeline as data: which stage works on what at each tick. Nothing here runs a model.

The layers are cut into stages x rounds chunks; chunk c lies on stage c % stages. With several rounds ("interleaved") a
microbatch passes all stages as many times, and the pipeline fills and drains in a fraction of the time.

A program of many devices is one program: all stages are in the same tick. A tick has a place for one forward and one
place for one backward of a chunk on every stage; where no stage has anything for one of the two places, the tick does
not have it. Both kinds have as many places for forward as for backward, and in both the same share of them is idle:

    "gpipe": all forwards, then all backwards; a stage keeps the inputs of all microbatches.
    "1f1b": a backward as soon as it can be; the inputs that a stage keeps do not grow with the microbatches, at most
        stages * rounds + stages - 1 of them. (Stages out of step with each other need fewer, `stages` for one round.)
"""

import dataclasses
import functools
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from shardzoo.errors import fail_if

IDLE = -1


class Work(NamedTuple):
    """What each stage does at each tick; -1 where it is idle. `slot` is where the input of the chunk is kept."""

    microbatch: Int[np.ndarray, "ticks stages"]
    round: Int[np.ndarray, "ticks stages"]
    slot: Int[np.ndarray, "ticks stages"]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The places of a pipeline's ticks, and how many inputs a stage keeps at most."""

    stages: int
    microbatches: int
    rounds: int
    forward: Work
    backward: Work
    slots: int

    @property
    def places(self) -> int:
        """Places for work on a stage: ticks with a place for forward, and those with one for backward."""
        return sum(int((work.microbatch != IDLE).any(axis=1).sum()) for work in (self.forward, self.backward))

    @property
    def idle(self) -> float:
        """The share of all places in which a stage has nothing to do, counted."""
        busy = sum(int((work.microbatch != IDLE).sum()) for work in (self.forward, self.backward))
        return 1 - busy / (self.places * self.stages)


def bubble(stages: int, microbatches: int, rounds: int = 1) -> float:
    """The idle share of a pipeline by formula, the same for forward alone, "gpipe" and "1f1b".

    (stages - 1) / (rounds * microbatches + stages - 1), where one round or full groups of `stages` microbatches leave
    no further gaps; the last group waits for itself if it is not full.

    Raises:
        InputError: a number below 1.
    """
    _check(stages, microbatches, rounds)
    last = stages if rounds == 1 else (microbatches - 1) % stages + 1  # microbatches of the last group
    waits = (rounds - 1) * (stages - last) + stages - 1
    return waits / (rounds * microbatches + waits)


def schedule(stages: int, microbatches: int, rounds: int = 1, kind: str = "1f1b") -> Schedule:
    """The ticks of forward and backward, by simulation: each stage takes its next chunk as soon as its input is there.

    Raises:
        InputError: a number below 1; an unknown kind.
    """
    _check(stages, microbatches, rounds)
    fail_if([] if kind in ("gpipe", "1f1b") else [f"kind={kind!r} is unknown: use 'gpipe' or '1f1b'"], "schedule")
    return _schedule(stages, microbatches, rounds, kind)


def _check(stages: int, microbatches: int, rounds: int) -> None:
    sizes = dict(stages=stages, microbatches=microbatches, rounds=rounds)
    fail_if([f"{name}={n} is not at least 1: change it" for name, n in sizes.items() if n < 1], "schedule")


@functools.lru_cache(maxsize=64)
def _schedule(stages: int, microbatches: int, rounds: int, kind: str) -> Schedule:
    forward = _ticks(stages, microbatches, rounds)
    chunks = stages * rounds
    start = forward.max() + 1 if kind == "gpipe" else 0
    # The backward pass goes the other way: chunk c of it is chunk -1 - c of the forward one, on the stages in reverse.
    backward = _ticks(stages, microbatches, rounds, first=np.maximum(forward[chunks - 1], start))[::-1]
    slot = _slots(forward, backward, stages)
    return Schedule(
        stages, microbatches, rounds, _table(forward, slot, stages), _table(backward, slot, stages), int(slot.max()) + 1
    )


def _ticks(
    stages: int, microbatches: int, rounds: int, first: Int[np.ndarray, " microbatches"] | None = None
) -> Int[np.ndarray, "chunks microbatches"]:
    """The tick at which each chunk works on each microbatch; `first` is when chunk 0 may begin with each.

    A stage takes groups of as many microbatches as there are stages, each group through all its chunks.
    """
    at = np.full((stages * rounds, microbatches), IDLE)
    order = [
        (turn, m)
        for group in range(0, microbatches, stages)
        for turn in range(rounds)
        for m in range(group, min(group + stages, microbatches))
    ]
    next_of, tick = [0] * stages, 0
    while min(next_of) < len(order):
        for stage in range(stages):
            if next_of[stage] == len(order):
                continue
            turn, m = order[next_of[stage]]
            chunk = turn * stages + stage
            if (first is None or first[m] <= tick) if chunk == 0 else IDLE < at[chunk - 1, m] < tick:
                at[chunk, m] = tick
                next_of[stage] += 1
        tick += 1
    return at


def _slots(
    forward: Int[np.ndarray, "chunks microbatches"], backward: Int[np.ndarray, "chunks microbatches"], stages: int
) -> Int[np.ndarray, "chunks microbatches"]:
    """Where a stage keeps the input of each of its chunks, from the tick of its forward to that of its backward."""
    slot = np.full(forward.shape, IDLE)
    for stage in range(stages):
        free_from: list[int] = []  # of each slot, the first tick at which it is free
        mine = [(forward[c, m], c, m) for c in range(stage, len(forward), stages) for m in range(forward.shape[1])]
        for tick, c, m in sorted(mine):
            found = next((i for i, free in enumerate(free_from) if free <= tick), len(free_from))
            free_from[found : found + 1] = [backward[c, m] + 1]
            slot[c, m] = found
    return slot


def _table(
    at: Int[np.ndarray, "chunks microbatches"], slot: Int[np.ndarray, "chunks microbatches"], stages: int
) -> Work:
    """The same by tick and stage."""
    work = Work(*np.full((3, at.max() + 1, stages), IDLE))
    for (chunk, m), tick in np.ndenumerate(at):
        for table, value in zip(work, (m, chunk // stages, slot[chunk, m]), strict=True):
            table[tick, chunk % stages] = value
    return work
