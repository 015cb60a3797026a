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

    XLA's runtime for CPUs may start either first, each device as it comes; then devices wait for each other for ever.
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
