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
