"""What `inspect` shows of a training run and of one of its steps."""

import json

import toy_training as toy
from command_line import invoke


def test_inspect_shows_a_run_and_its_steps(tmp_path):
    run = toy.Run({"data": 2, "tensor": 2}, True, trainable=["blocks.*", "head"])
    state = run.first()
    with run.training(tmp_path) as training:
        training.save(state, step=2, metrics={"loss": 1.5})
        training.save(state, step=3, metrics={"loss": 0.5})
    shown = invoke("inspect", tmp_path)
    assert shown.status == 0
    for part in (
        "training run, 2 steps",
        "data=2,tensor=2 (at rest over data)",
        "loss=1.5",
        "examples=0",
        "training: step 3, saved on data=2,tensor=2 (at rest over data) by 1 processes, data examples=0, loss=0.5",
        "optimizer: [EmptyState(), [ScaleByAdamState(count, mu, nu), ",
        "1 parameters are not trained: embed",
        "opt_state/1.0.mu.blocks.up",
    ):
        assert part in " ".join(shown.out.split()), shown.out
    found = json.loads(invoke("inspect", tmp_path, "--json").out)
    assert [(s["step"], s["metrics"]["loss"], s["mesh"]) for s in found["steps"]] == [
        (2, 1.5, "data=2,tensor=2"),
        (3, 0.5, "data=2,tensor=2"),
    ]
    assert found["steps"][0]["bytes"] > 100_000 and found["last"]["training"]["frozen"] == ["embed"]
    one = json.loads(invoke("inspect", tmp_path / "2", "--json").out)
    assert one["training"]["step"] == 2 and "1.0.mu.head" in one["opt_state"]
