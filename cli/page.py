"""An audit as one page of HTML: bars of memory, how each part of the model lies on the mesh, meshes by time.

It is made of what `audit --json` prints, and needs no network, font or script.
"""

import html
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardzoo.checkpoints.store import storage_error
from shardzoo.cli.terminal import count_text, size_text

# Of kinds of memory and parts of work, by what their name has in it; validated for contrast on both backgrounds.
COLOURS = {
    "attention": "#4269d0", "delta": "#6f8fe0", "mlp": "#efb118", "convolutions": "#3ca951", "modulation": "#ff725c",
    "embeddings": "#6cc5b0", "norms": "#9498a0", "head": "#a463f2", "gradients": "#97bbf5", "moments": "#9c6b4e",
    "cache": "#ff8ab7", "temporaries": "#e0562f", "results": "#b0452a", "inputs": "#7d8a99", "compute": "#4269d0",
    "reading": "#3ca951", "links": "#ff725c", "activations": "#7d8a99", "other": "#b8bcc4",
}  # fmt: skip
MOST_DEVICES = 64  # that are drawn one by one
_STYLE = """
:root { color-scheme: light dark; --ink: #1d2129; --soft: #5b6472; --line: #d9dde3; --page: #ffffff; --bar: #eef0f3; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --soft: #9aa3af; --line: #353b45; --page: #14171c; --bar: #232830; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 2rem auto;
  max-width: 62rem; padding: 0 1.2rem; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; }
h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; } p { margin: .3rem 0; } .soft { color: var(--soft); }
.bar { position: relative; display: flex; height: 1.6rem; background: var(--bar); border-radius: 3px; overflow: hidden;
  margin: .2rem 0; } .bar > span { display: block; height: 100%; }
.small { height: .8rem; }
.room { border-right: 2px dashed var(--soft); }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; font-size: .88rem; margin: .4rem 0; }
.key { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin-right: .35rem;
  vertical-align: -.05rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; width: 100%; }
th { text-align: left; font-weight: 600; color: var(--soft); border-bottom: 1px solid var(--line); }
td, th { padding: .22rem .6rem .22rem 0; vertical-align: middle; white-space: nowrap; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
td.wide { width: 30%; min-width: 9rem; }
tr.best td { font-weight: 600; } tr.not td { color: var(--soft); } .bad { color: #d33a2c; font-weight: 600; }
.mesh { display: flex; flex-wrap: wrap; gap: .2rem .5rem; max-width: 27rem; }
.mesh > span { display: flex; gap: 2px; }
.mesh > span > span { width: 1.3rem; height: 1.15rem; border-radius: 2px; font-size: .68rem; line-height: 1.15rem;
  text-align: center; color: #fff; }
"""


def write(path: Path, audits: Sequence[Mapping[str, Any]], title: str) -> None:
    """Writes the page; what is at `path` is replaced once all of it is written.

    Raises:
        InputError: the storage is full or failed.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(page(audits, title), encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise storage_error(str(path), error, path.parent) from error


def page(audits: Sequence[Mapping[str, Any]], title: str) -> str:
    """The page of these audits (`audit --json` of each target)."""
    body = "\n".join(line for one in audits for line in _target(one))
    name = html.escape(title)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}: audit</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{_STYLE}</style></head>\n'
        f"<body>\n{body}\n</body></html>\n"
    )


def _target(audit: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h1>{html.escape(audit['target'])}</h1>"
    said = f"{audit['family']}, {audit['kind']}: {count_text(audit['parameters'])} parameters"
    yield f'<p class="soft">{html.escape(said)}, {size_text(audit["parameter_bytes"])} as stored</p>'
    ranking = audit["ranking"]
    if ranking:
        yield from _ranking(ranking)
    shown = audit["meshes"] or ([audit["best"]] if audit["best"] else [])
    for mesh in shown:
        yield from _mesh(mesh, ranking)


def _ranking(ranking: Mapping[str, Any]) -> Iterator[str]:
    meshes = ranking["meshes"]
    yield f"<h2>Meshes of {html.escape(ranking['chips'])}, {ranking['count']} chips</h2>"
    if ranking["best_because"] and meshes[0]["fits_memory"]:
        yield f"<p>Best: <b>{html.escape(meshes[0]['mesh'])}</b>, {html.escape(ranking['best_because'])}.</p>"
    for remedy in ranking["remedies"]:
        what = f"{remedy['what']}: {remedy['mesh']}, {size_text(remedy['memory'])} a chip"
        yield f'<p><span class="bad">What would fit</span> {html.escape(what)}</p>'
    if meshes:
        yield '<div class="scroll"><table><tr><th>mesh</th><th class="n">step ms</th><th>compute or reading, links</th>'
        yield '<th class="n">can hide</th><th class="n">bound</th><th class="n">memory</th><th>of the chip</th></tr>'
        slowest = max(one["seconds"] for one in meshes)
        yield from (_ranked(one, slowest, first=one is meshes[0]) for one in meshes)
        yield "</table></div>"
        yield _legend(("compute", "reading", "links"))
    for name, reason in ranking["do_not_fit"].items():
        yield f'<p class="soft">not {html.escape(name)}: {html.escape(reason)}</p>'


def _ranked(one: Mapping[str, Any], slowest: float, *, first: bool) -> str:
    work = max(one["compute_seconds"], one["weight_reading_seconds"])
    kind = "compute" if work == one["compute_seconds"] else "reading"
    links = one["seconds"] - work
    hide = one["seconds"] - one["seconds_with_links_hidden"]
    times = _bar([(kind, work / slowest), ("links", links / slowest)], small=True)
    held = _bar(_shares(one["memory"], one["room"]), small=True)
    total = size_text(one["memory"]["total"])
    state = "best" if first and one["fits_memory"] else "" if one["fits_memory"] else "not"
    memory = total if one["fits_memory"] else f'<span class="bad">{total}</span>'
    return (
        f'<tr class="{state}"><td>{html.escape(one["mesh"])}</td><td class="n">{1000 * one["seconds"]:.1f}</td>'
        f'<td class="wide">{times}</td><td class="n">{1000 * hide:.1f}</td>'
        f'<td class="n">{one["utilisation_bound"]:.0%}</td><td class="n">{memory}</td><td class="wide">{held}</td></tr>'
    )


def _mesh(mesh: Mapping[str, Any], ranking: Mapping[str, Any] | None) -> Iterator[str]:
    found = [one for one in (ranking["meshes"] if ranking else ()) if one["mesh"] == mesh["mesh"]]
    predicted = found[0] if found else None
    memory = predicted["memory"] if predicted else mesh["memory"]
    yield f"<h2>{html.escape(mesh['mesh'])}</h2>"
    for problem in mesh.get("problems", ()):
        yield f'<p class="bad">{html.escape(problem)}</p>'
    if memory:
        yield from _memory(memory, predicted["room"] if predicted else None)
    if mesh["compiled"]:
        peak, total = (size_text(mesh["compiled"][name]) for name in ("peak_bytes", "total_bytes"))
        yield f"<p>By the compiler: {peak} alive at the worst moment, {total} set aside in the chip's memory.</p>"
    yield from _splits(mesh)
    if predicted:
        yield from _work(predicted)
    yield from _dimensions(mesh)


def _memory(memory: Mapping[str, Any], room: int | None) -> Iterator[str]:
    whole = max(room or 0, memory["total"])
    of = f" of {size_text(room)}" if room else ""
    yield f"<h3>Memory of a chip: {size_text(memory['total'])}{of}</h3>"
    over = room is not None and memory["total"] > room
    if over:
        yield '<p class="bad">More than a chip has.</p>'
    yield _bar(_shares(memory, whole))
    yield _legend((name, size_text(bytes)) for name, bytes in memory["bars"].items())
    if memory["holds"]:
        held = "; ".join(f"{what} ({size_text(bytes)})" for what, bytes in memory["holds"][:3])
        yield f'<p class="soft">Worst moment: {html.escape(memory["where"])}. Largest then: {html.escape(held)}.</p>'


def _shares(memory: Mapping[str, Any], whole: int) -> list[tuple[str, float]]:
    most = max(whole, memory["total"])
    return [(name, bytes / most) for name, bytes in memory["bars"].items()]


def _splits(mesh: Mapping[str, Any]) -> Iterator[str]:
    """Each part of the model over the devices: those of one colour and letter hold the same piece."""
    sizes = {axis: size for axis, size in mesh["splits"]["axes"].items() if size > 1}
    devices = math.prod(sizes.values())
    if not 1 < devices <= MOST_DEVICES:
        return
    yield "<h3>How the weights lie on the mesh</h3>"
    yield f'<p class="soft">A cell is a device ({html.escape(" x ".join(f"{a}={n}" for a, n in sizes.items()))}, the'
    yield " last axis along a row); devices of one letter hold the same piece.</p>"
    yield '<div class="scroll"><table><tr><th>part</th><th class="n">all</th><th class="n">a chip</th><th>split</th>'
    yield "<th>devices</th></tr>"
    for part in mesh["splits"]["parts"]:
        split = {dim: [axis for axis in axes if axis in sizes] for dim, axes in part["split"].items()}
        over = " and ".join(f"{dim} over {'+'.join(axes)}" for dim, axes in split.items() if axes) or "whole on each"
        yield (
            f"<tr><td>{html.escape(part['part'])}</td><td class='n'>{size_text(part['bytes'])}</td>"
            f"<td class='n'>{size_text(part['device_bytes'])}</td><td>{html.escape(over)}</td>"
            f"<td>{_grid(sizes, [axis for axes in part['split'].values() for axis in axes])}</td></tr>"
        )
    yield "</table></div>"


def _grid(sizes: Mapping[str, int], over: Sequence[str]) -> str:
    """The devices in a row, those of one place on all axes but the last together."""
    pieces: dict[tuple[int, ...], int] = {}
    groups: dict[tuple[int, ...], list[int]] = {}
    for place in itertools.product(*(range(n) for n in sizes.values())):
        piece = tuple(at for axis, at in zip(sizes, place, strict=True) if axis in over)
        groups.setdefault(place[:-1], []).append(pieces.setdefault(piece, len(pieces)))
    drawn = (
        "".join(f'<span style="background:hsl({_hue(n, len(pieces))})">{_letter(n)}</span>' for n in cells)
        for cells in groups.values()
    )
    return '<span class="mesh">' + "".join(f"<span>{cells}</span>" for cells in drawn) + "</span>"


def _hue(number: int, count: int) -> str:
    return f"{round(215 + 300 * number / max(count, 1)) % 360} 52% 42%"


def _letter(number: int) -> str:
    return chr(ord("a") + number) if number < 26 else str(number)


def _work(one: Mapping[str, Any]) -> Iterator[str]:
    shares = sorted(one["compute_share_by_part"].items(), key=lambda item: -item[1])
    yield f"<h3>Matrix work: {1000 * one['compute_seconds']:.1f} ms at the chip's peak</h3>"
    yield _bar(shares)
    yield _legend((part, f"{1000 * share * one['compute_seconds']:.1f} ms, {share:.0%}") for part, share in shares)
    if not one["collectives"]:
        return
    yield "<h3>Collectives of a step</h3>"
    yield '<div class="scroll"><table><tr><th>kind</th><th>over</th><th class="n">a block</th><th class="n">all</th>'
    yield '<th class="n">bytes sent</th><th class="n">ms</th><th class="n">can hide</th></tr>'
    for c in sorted(one["collectives"], key=lambda c: -c["seconds"]):
        where = f"{c['count'] // c['runs']} in each of {c['runs']}" if c["runs"] > 1 else f"{c['count']}, once"
        yield (
            f"<tr><td>{c['kind']}</td><td>{'+'.join(c['axes'])}</td><td class='n'>{where}</td>"
            f"<td class='n'>{c['count']}</td><td class='n'>{size_text(c['sent_bytes'])}</td>"
            f"<td class='n'>{1000 * c['seconds']:.2f}</td><td class='n'>{1000 * c['hidden_seconds']:.2f}</td></tr>"
        )
    yield "</table></div>"


def _dimensions(mesh: Mapping[str, Any]) -> Iterator[str]:
    if not mesh["dimensions"]:
        return
    yield "<h3>Dimensions</h3>"
    yield '<div class="scroll"><table><tr><th>dim</th><th class="n">size</th><th>over</th><th class="n">ways</th>'
    yield "<th>a device has</th><th>divisors</th></tr>"
    for d in mesh["dimensions"]:
        each = f"{d['size'] // d['ways']}" + (f", on {d['repeats']} ranks" if d["repeats"] > 1 else "")
        state = each if d["divides"] else '<span class="bad">does not divide</span>'
        listed = " ".join(map(str, d["divisors"][:12])) + (" .." if len(d["divisors"]) > 12 else "")
        yield (
            f"<tr><td>{html.escape(d['name'])}</td><td class='n'>{d['size']}</td><td>{html.escape(d['over'])}</td>"
            f"<td class='n'>{d['ways']}</td><td>{state}</td><td class='soft'>{listed}</td></tr>"
        )
    yield "</table></div>"
    for degree, dims in mesh["tensor_degrees"]["binding"].items():
        yield f"<p>{html.escape(' and '.join(dims))}: what tensor={degree} meets first.</p>"


def _bar(shares: Iterable[tuple[str, float]], *, small: bool = False) -> str:
    parts = "".join(
        f'<span style="width:{100 * share:.3f}%;background:{_colour(name)}" title="{html.escape(name)}"></span>'
        for name, share in shares
        if share > 0
    )
    return f'<div class="bar{" small" if small else ""}">{parts}</div>'


def _legend(names: Iterable[str | tuple[str, str]]) -> str:
    pairs = [(name, "") if isinstance(name, str) else name for name in names]
    keys = "".join(
        f'<span><span class="key" style="background:{_colour(name)}"></span>{html.escape(name)}'
        f' <span class="soft">{html.escape(said)}</span></span>'
        for name, said in pairs
    )
    return f'<div class="legend">{keys}</div>'


def _colour(name: str) -> str:
    return next((colour for word, colour in COLOURS.items() if word in name), COLOURS["other"])
