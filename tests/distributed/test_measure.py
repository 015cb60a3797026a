"""Measuring in several processes: all see all devices, and who is late."""

from pathlib import Path

from load_workers import load_workers
from processes import run

workers = load_workers(Path(__file__).with_name("measure_workers.py"))


def test_every_process_sees_all_devices_and_the_one_that_is_late():
    first, second = run(workers.late_device, {"late": 3, "steps": 3}, processes=2, devices=2)
    assert [(d["process"], d["device"]) for d in first["devices"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert first["devices"] == second["devices"]
    for one in (first, second):
        assert one["straggler"] == [1, 1] and one["lateness"] > 1
        late = one["devices"][3]
        assert all(late["computing"] > 2 * d["computing"] for d in one["devices"][:3])
        assert all(late["exposed"] < d["exposed"] for d in one["devices"][:3]), "the others wait for it"
