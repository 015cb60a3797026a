"""The main job, start to end, on weights that were really trained: SmolLM2-135M-Instruct.

An ordinary Hugging Face folder is made first (examples/smollm2.py). From there only the product's commands run, each
shown with its time and peak memory; the script stops with status 1 if one of them does not end as it must, if the three
meshes do not give the same text, or if the exported folder differs from the first one by a bit.

    python examples/demo.py FOLDER
"""

import argparse
import dataclasses
import filecmp
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

PROMPT = "Explain in two sentences why the sky is blue."
MESHES = ("one", "data=2,context=3", "context=2,tensor=3")
MIB = 2**20 if sys.platform == "darwin" else 2**10  # units of ru_maxrss in a MiB


@dataclasses.dataclass(frozen=True)
class Step:
    """A command that has run."""

    shown: str
    seconds: float
    peak_mib: float
    output: str


def run(program: list[str], shown: str, status: int = 0) -> Step:
    """Runs a command, prints what it prints, its time and the peak memory of its process."""
    print(f"\n$ {shown}", flush=True)
    begin = time.monotonic()
    process = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        print(line, end="", flush=True)
    _, code, usage = os.wait4(process.pid, 0)
    step = Step(shown, time.monotonic() - begin, usage.ru_maxrss / MIB, "".join(lines))
    print(f"  [{step.seconds:.1f} s, peak {step.peak_mib:.0f} MiB]", flush=True)
    if os.waitstatus_to_exitcode(code) != status:
        raise SystemExit(f"demo: exit status {os.waitstatus_to_exitcode(code)}, expected {status}")
    return step


def shardzoo(*arguments: str | Path, status: int = 0) -> Step:
    words = [str(argument) for argument in arguments]
    return run([sys.executable, "-m", "shardzoo", *words], shlex.join(["shardzoo", *words]), status)


def restore_and_generate(checkpoint: Path) -> list[Step]:
    """The same reply on one device and on two meshes, which split heads, or gather keys and values."""
    steps = [
        shardzoo(
            *("generate", checkpoint, "--prompt", PROMPT, "--max-new-tokens", "64"),
            *("--dtype", "float32", "--mesh", mesh),
        )
        for mesh in MESHES
    ]
    if len({step.output for step in steps}) != 1 or not steps[0].output.strip():
        raise SystemExit("demo: the meshes do not give the same text")
    print(f"\nThe same text on {len(MESHES)} meshes: {', '.join(MESHES)}.")
    return steps


def compare(before: Path, after: Path) -> None:
    """Stops unless both folders hold the same files with the same bytes."""
    names = sorted(path.name for path in before.iterdir())
    others = sorted(path.name for path in after.iterdir())
    if names != others:
        raise SystemExit(f"demo: {before} holds {names}, {after} holds {others}")
    _, different, unread = filecmp.cmpfiles(before, after, names, shallow=False)
    if different or unread:
        raise SystemExit(f"demo: {', '.join(different + unread)} did not come back as they were")
    print(f"\nAll {len(names)} files of {after} equal those of {before} bit for bit: {', '.join(names)}.")


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert, check, restore, run and export SmolLM2-135M-Instruct.")
    parser.add_argument("folder", type=Path, help="folder to work in")
    folder = parser.parse_args().folder
    source, checkpoint, exported = (folder / name for name in ("smollm2-hf", "smollm2", "smollm2-exported"))
    for path in (source, checkpoint, exported):
        shutil.rmtree(path, ignore_errors=True)
    script = Path(__file__).with_name("smollm2.py")
    refused = [word for degree in (2, 4, 6, 9) for word in ("--mesh", f"tensor={degree}")]
    steps = [
        run([sys.executable, str(script), str(source)], f"python examples/smollm2.py {source}"),
        shardzoo("audit", source, "--mesh", "tensor=3"),
        shardzoo("audit", source, *refused, status=1),
        shardzoo("convert", source, checkpoint, "--dry-run"),
        shardzoo("convert", source, checkpoint),
        shardzoo("inspect", checkpoint),
        shardzoo("verify", checkpoint, source),
        *restore_and_generate(checkpoint),
        shardzoo("export", checkpoint, exported),
    ]
    compare(source, exported)
    print(f"\n{'seconds':>8} {'peak MiB':>9}  command")
    for step in steps:
        print(f"{step.seconds:8.1f} {step.peak_mib:9.0f}  {step.shown}")


if __name__ == "__main__":
    main()
