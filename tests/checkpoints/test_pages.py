"""Memory of large blocks: asked for before it is filled, in huge pages only as long as these are at hand."""

import mmap
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from shardzoo.checkpoints import pages

HUGE = pages._huge_page()
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux for what it reports")
huge = pytest.mark.skipif(not HUGE, reason="this system gives no huge pages")


def reported(block: np.ndarray, what: str) -> int:
    """Bytes that the system reports of all maps that share addresses with a block: "Rss", "AnonHugePages"."""
    start, stop = np.lib.array_utils.byte_bounds(block)
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if "-" in name:
            low, high = (int(n, 16) for n in name.split("-"))
            inside = low < stop and start < high
        elif inside and name == f"{what}:":
            total += int(rest.split()[0]) * 1024
    return total


@pytest.fixture
def supply(monkeypatch):
    monkeypatch.setattr(pages, "_supply", pages._Supply())
    return pages._supply


@linux
@huge
def test_memory_is_there_before_it_is_filled(supply, monkeypatch):
    monkeypatch.setattr(pages, "SLOW", 1.0)
    block = pages.empty([8 * HUGE], np.uint8)
    assert reported(block, "Rss") < HUGE
    pages.populate(block)
    assert reported(block, "Rss") >= 8 * HUGE
    assert reported(block, "AnonHugePages") >= HUGE  # how many there are is the system's to say


@linux
@huge
def test_small_pages_after_a_slow_huge_one_and_huge_ones_again_later(supply, monkeypatch):
    monkeypatch.setattr(pages, "SLOW", 0.0)
    monkeypatch.setattr(pages, "SMALL", 32 * HUGE)
    blocks = [pages.empty([16 * HUGE], np.uint8) for _ in range(4)]
    found = []
    for block in blocks:
        pages.populate(block)
        block[...] = 1
        found.append(reported(block, "AnonHugePages") // HUGE)
    # The first huge page of all is slow; 32 huge pages' worth of small ones follow, counted block by block.
    assert found[0] <= 1 and found[1] == 0
    assert 1 <= max(found[2:]) <= 2


@linux
def test_populating_leaves_what_is_there(supply):
    block = pages.empty([4 << 20], np.uint32)
    block[...] = np.arange(block.size)
    pages.populate(block)
    pages.populate(block.reshape(1024, -1)[100:300, 17:2000])
    assert (block == np.arange(block.size)).all()


def test_small_blocks_and_other_systems_do_without(monkeypatch):
    pages.populate(pages.empty([3], np.uint16))
    monkeypatch.setattr(pages, "_madvise", lambda: None)
    block = pages.empty([1 << 20], np.uint8)
    pages.populate(block)
    block[...] = 7
    assert (block == 7).all()


def test_memory_that_there_is_not():
    with pytest.raises(MemoryError, match=r"bytes for an array of shape \(1125899906842624,\)"):
        pages.empty([1 << 50], np.uint8)


@linux
def test_advice_that_fails_is_told_apart_from_advice_not_known():
    block = pages.empty([1 << 20], np.uint8)
    start, stop = np.lib.array_utils.byte_bounds(block)
    pages.advise(start, stop, 12345)  # no kernel knows it
    with pytest.raises(OSError):
        pages.advise(0, mmap.PAGESIZE, mmap.MADV_WILLNEED)  # nothing lies there


@linux
def test_other_threads_run_meanwhile():
    block = pages.empty([1 << 29], np.uint8)
    start, stop = np.lib.array_utils.byte_bounds(block)
    pages.advise(start, stop, mmap.MADV_NOHUGEPAGE)
    took = []

    def ask():
        before = time.perf_counter()
        pages.advise(start, stop, pages.POPULATE_WRITE)
        took.append(time.perf_counter() - before)

    asking = threading.Thread(target=ask)
    asking.start()
    longest, last = 0.0, time.perf_counter()
    while not took:
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    asking.join()
    assert longest < took[0] / 2
