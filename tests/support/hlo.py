"""What stands in the text of a compiled program."""

import collections
import re

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_FOUND = re.compile(rf"= [^=]*? ({'|'.join(KINDS)})(?:-start)?\(.*?(?:replica_groups|source_target_pairs)=(\S+)")
_LONE = re.compile(r"\{\{\d+\}|\[\d+,1\]|\{\},?$")  # groups of one device each


def collectives(compiled) -> dict[str, int]:
    """How often each collective among several devices stands there; those in the body of a loop count once."""
    found = _FOUND.findall(compiled.as_text())
    return dict(collections.Counter(kind for kind, groups in found if not _LONE.match(groups)))


_COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = .*?\s([\w\-]+)\((.*)$")
_NAMES = re.compile(r"%([\w.\-]+)")


def unordered(compiled) -> list[tuple[str, str]]:
    """Pairs that hold collectives, one of them a loop or a branch, and that no data put in an order.

    They are named as the program has them scheduled. XLA's runtime for CPUs (`ThunkExecutor`) starts what has its data,
    in any order, but what holds collectives stands in that of the schedule: each starts when the one before has
    returned. A collective returns when it is done, so two of them never meet in another order on another device. A
    loop or a branch returns as soon as a part of it is left to another thread, and runs on beside what comes next:
    see `overtaking`. Of pairs whose first is a collective only another schedule makes such a pair.
    """
    computations: dict[str, list[tuple[str, str, list[str]]]] = {}
    for line in compiled.as_text().splitlines():
        if begin := _COMPUTATION.match(line):
            body = computations[begin[1]] = []
        elif found := _INSTRUCTION.match(line):
            body.append((found[1], found[2], _NAMES.findall(found[3])))

    def holds(computation: str) -> bool:
        return any(
            op in KINDS or any(holds(n) for n in names if n in computations)
            for _, op, names in computations[computation]
        )

    pairs = []
    for body in computations.values():
        before: dict[str, set[str]] = {}
        seen: list[tuple[str, bool]] = []
        for name, op, names in body:
            nested = any(holds(n) for n in names if n in computations)
            before[name] = set().union(*({n} | before[n] for n in names if n in before))
            if op in KINDS or nested:
                pairs += [(a, name) for a, inner in seen if (inner or nested) and a not in before[name]]
                seen.append((name, nested))
    return pairs


def overtaking(compiled) -> list[tuple[str, str]]:
    """The pairs of `unordered` that can stop a program for ever: a loop or a branch and what need not wait for its end.

    Devices then have two collectives under way at once. Each holds a thread until its other devices come to it too
    (collectives meet by run, instruction and devices; they are never mixed up), and the pool has as many threads as
    devices, or cores if these are more. By XLA's source; that 1F1B hung so, and no longer in order, was measured.
    """
    text = compiled.as_text()
    plain = set(re.findall(rf"%([\w.\-]+) = [^=]*? (?:{'|'.join(KINDS)})\(", text))
    return [(first, then) for first, then in unordered(compiled) if first not in plain]


_TYPE = re.compile(r"%([\w.\-]+) = \(?(\w+)\[")
_PRODUCT = re.compile(r" = (\w+)\[[^=]*? dot\(%([\w.\-]+), %([\w.\-]+)\)(.*)$", re.MULTILINE)


def products(compiled) -> list[tuple[str, str, str]]:
    """The dtypes of the sides and of the result of each product of two matrices, not of several or in full precision.

    Those are the products by weights: attention's go by heads, and they and a few others ask for full precision.
    """
    text = compiled.as_text()
    types = dict(_TYPE.findall(text))
    found = _PRODUCT.findall(text)
    special = ("batch_dims", "operand_precision")
    return [(types[left], types[right], y) for y, left, right, rest in found if not any(s in rest for s in special)]
