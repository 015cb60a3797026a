"""A training run's folder: saves in the background, what is kept, and going on after anything.

    with checkpoints.Training("runs/a", declared, optimizer, mesh, every=100, keep=3, best="loss") as run:
        state = run.restore() or first_state()  # a `TrainingState`
        while int(state.step) < steps and not run.stopping:
            state, loss = train_step(state)
            run.save(state, metrics={"loss": loss})

`save` is called at every step by every process: it knows what is due, and it is where SIGTERM is noticed.

The folder holds one checkpoint for each step that was kept, named by its number: a checkpoint as any other of this
project, so that `restore`, `export`, `verify` and `generate` take it for its weights. A step has its name only when all
of it is written and every process has said so; what a killed run leaves has another name, and the next run removes it.
"""

import contextlib
import fcntl
import math
import numbers
import os
import shutil
import signal
import threading
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.errors import JaxRuntimeError
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jaxtyping import Array

from shardzoo.checkpoints import distributed, snapshot, training_save
from shardzoo.checkpoints.checkpoint import Checkpoint, finished_steps
from shardzoo.checkpoints.checkpoint import open as open_checkpoint
from shardzoo.checkpoints.grid import LeafSpec
from shardzoo.checkpoints.manifest import OPT_STATE, ManifestHeader
from shardzoo.checkpoints.orbax_layout import CHECKPOINT_METADATA, STAGING_SUFFIX
from shardzoo.checkpoints.restore import BUDGET
from shardzoo.checkpoints.save import header_of, live_leaves
from shardzoo.checkpoints.store import remove_folder, storage_error
from shardzoo.checkpoints.training_restore import Run, restore_state
from shardzoo.checkpoints.training_state import (
    TrainingState,
    about,
    checked_step,
    json_metrics,
    json_position,
    step_of,
    trained_paths,
)
from shardzoo.errors import InputError, fail_if
from shardzoo.zoo import optimizer_state

REMOVED = ".removed" + STAGING_SUFFIX  # a step on its way out: no reader takes it, the next run removes what is left


def _is_count(value: Any) -> bool:
    return value is None or (isinstance(value, numbers.Integral) and value is not True and int(value) > 0)


def _is_time(value: Any) -> bool:
    return value is None or (isinstance(value, numbers.Real) and value is not True and 0 < float(value) < math.inf)


class Training:
    """The folder of one run; a context manager, used by every process of the mesh alike.

    Args:
        folder: where the steps are; made if it is not there. On a file system that every process sees.
        declared: the declaration of the model as it lies on `mesh`, split at rest (FSDP) or not.
        optimizer: optax's, or anything with its `init`.
        mesh: from `zoo.make_mesh`; any that the model fits, whichever the steps were saved on.
        trainable: patterns of the parameters that the optimizer is given; all of them if None.
        every: save when the step is a multiple of this.
        seconds: save when so many seconds have passed since the last save began, by the first process's clock.
        keep: how many of the last steps to keep; all of them if None.
        best: a metric: the step where it is lowest is kept besides (with a "-" in front, highest: "-accuracy").
        source: the checkpoint that the model came from, so that a step can still be exported to its layout: tensors
            that the model does not run go along into every step, and are read from there each time.
        header: what the manifest says of the model, where it is neither of `source` nor of a registered family.
        assets: small files to carry along (tokenizer, config), besides those of `source`.
        sync: flush every file to the device, for storage that must survive loss of power.
        timeout: seconds that processes wait for each other at every step of saving and restoring.

    Without `every` and `seconds`, each call of `save` saves.

    Raises:
        InputError: the folder is not writable, or another run is using it; options that do not fit together.
    """

    def __init__(
        self,
        folder: str | Path,
        declared: Any,
        optimizer: Any,
        mesh: Mesh,
        *,
        trainable: str | Iterable[str] | None = None,
        every: int | None = None,
        seconds: float | int | None = None,
        keep: int | None = 3,
        best: str | None = None,
        source: Checkpoint | None = None,
        header: ManifestHeader | None = None,
        assets: Mapping[str, Path | bytes] | None = None,
        sync: bool = True,
        timeout: float | int = distributed.TIMEOUT,
    ):
        counts, times = {"every": every, "keep": keep}, {"seconds": seconds, "timeout": timeout}
        wrong = [f"{n}={v!r} is not a whole number above 0" for n, v in counts.items() if not _is_count(v)]
        wrong += [f"{n}={v!r} is not a number above 0" for n, v in times.items() if not _is_time(v)]
        if best is not None and not (isinstance(best, str) and best.removeprefix("-")):
            wrong.append(f'best={best!r} is not the name of a metric, which may have a "-" in front')
        fail_if([f"{text}: change it, or leave it out" for text in wrong], "Training")
        self.folder = Path(os.path.abspath(folder))
        trainable = [trainable] if isinstance(trainable, str) else None if trainable is None else list(trainable)
        declared_state = optimizer_state.declare(optimizer, declared, trainable=trainable)
        trained = trained_paths(declared, trainable)
        self._run = Run(declared=declared, declared_state=declared_state, optimizer=optimizer, trainable=trainable,
                        trained=trained, mesh=mesh)  # fmt: skip
        self._every, self._seconds, self._keep, self._best = every, seconds, keep, best
        self._source, self._header, self._assets = source, header, dict(assets or {})
        self._sync, self._timeout = sync, timeout
        self._saved_at = time.monotonic()
        self._at: int | None = None  # the step that was restored or saved last
        self._before: int | None = None
        self._metrics: dict[int, float | None] = {}
        self._finishing: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._terminated = threading.Event()
        self._handlers: list = []
        self.stopping, self._closed = False, False
        self._lock = -1
        self._begin()
        try:
            self._orbax = training_save.checkpointer(self.folder, timeout)
        except (ValueError, OSError) as error:
            self._let_go()
            raise InputError(
                f"{self.folder}: holds a step that Orbax cannot read ({str(error)[:300]}): find it with"
                " `shardzoo verify`, and remove it"
            ) from error

    def _begin(self) -> None:
        """Takes the folder, and removes what a killed run has left in it."""
        mark = self.folder / f"{uuid.uuid4().hex}{STAGING_SUFFIX}"  # seen by every process that has the same folder
        try:
            with distributed.together("run", self.folder, timeout=self._timeout):
                if jax.process_index() == 0:
                    self._take(mark)
            mark = self.folder / distributed.share("run: mark", mark.name, timeout=self._timeout)[0]
            lost = (
                None if mark.is_dir() else f"{self.folder}: not seen here: use a file system that every process shares"
            )
            distributed.agree("run", lost, at=self.folder, timeout=self._timeout)
            if jax.process_index() == 0:
                mark.rmdir()
        except BaseException:
            self._let_go()
            raise

    def _take(self, mark: Path) -> None:
        try:
            if (self.folder / CHECKPOINT_METADATA).exists():
                raise InputError(f"{self.folder}: is a checkpoint itself: give the folder of a run, or a new one")
            self.folder.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            self._remove_unfinished()
            mark.mkdir()
        except OSError as error:
            raise storage_error(str(self.folder), error, self.folder) from error

    def _remove_unfinished(self) -> None:
        """Removes what is not a whole step; nobody else is at work in the folder."""
        for entry in list(os.scandir(self.folder)):
            if STAGING_SUFFIX in entry.name:
                shutil.rmtree(entry.path)

    def _take_lock(self) -> None:
        """Locks the folder for as long as this process lives; NFS keeps that to one machine."""
        self._lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._let_go()
            raise InputError(f"{self.folder}: another run is using it: wait for that, or choose another") from None

    def _let_go(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> "Training":
        if threading.current_thread() is threading.main_thread() and jax.process_count() == 1:
            before = signal.signal(signal.SIGTERM, lambda *_: self._terminated.set())
            self._handlers.append((signal.SIGTERM, before))
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        for number, before in self._handlers:
            signal.signal(number, before)
        if error is None:
            self.close()
            return
        try:
            if isinstance(error, JaxRuntimeError):
                self._name_who_is_gone(error)
            if not isinstance(error, distributed.ProcessTimeout):  # else the save under way cannot end
                with contextlib.suppress(Exception):  # the caller has the first failure
                    self.close()
        finally:
            self._let_go()

    def _name_who_is_gone(self, error: JaxRuntimeError) -> None:
        """A collective that failed does not say whose fault it was: whoever does not answer now is gone.

        Raises:
            distributed.ProcessTimeout: names them.
        """
        try:
            distributed.barrier("after a failed step", timeout=min(10.0, self._timeout))
        except distributed.ProcessTimeout as gone:
            raise gone from error

    def close(self) -> None:
        """Waits for the save under way and lets go of the folder.

        Raises:
            InputError: that save failed.
        """
        try:
            self.wait()
            self._orbax.close()
        finally:
            self._closed = True
            self._let_go()

    def wait(self) -> None:
        """Waits until the save under way is finished: its step is then there, and no sooner.

        Raises:
            InputError: it failed: the storage is full or not writable.
            distributed.ProcessTimeout: another process died or fell behind.
        """
        thread, self._finishing = self._finishing, None
        if thread is not None:
            thread.join()
        failure, self._failure = self._failure, None
        if isinstance(failure, InputError):  # on every process: the next save may succeed, and Orbax starts afresh
            self._at = self._before
            self._orbax = training_save.checkpointer(self.folder, self._timeout)
        if failure is not None:
            raise failure

    @property
    def steps(self) -> list[int]:
        """The steps that are there, finished, in order."""
        return finished_steps(self.folder)

    def restore(
        self, step: int | None = None, *, changes: Iterable[str] = (), budget: int = BUDGET
    ) -> TrainingState | None:
        """The state of a step on this run's mesh, the last one if None; None where there is no step at all.

        Each process reads the bytes that its devices hold, whatever the mesh, the processes and the splits at rest that
        the step was saved with.

        Going on from an earlier step gives up the later ones: the next save removes them.

        Args:
            step: one of `steps`.
            changes: what may differ from the saved run: "dtype" casts to the declared dtypes, "optimizer" begins the
                optimizer's state anew if it is another's, "trainable" keeps the state of parameters trained before and
                now, "config" computes with the declared one.
            budget: bytes that this process holds between file and device.

        Raises:
            InputError: no such step; a change of model, config, dtype, optimizer or trainable parameters that is not
                among `changes`, all in one message and before a value is read; missing or damaged files.
            distributed.ProcessTimeout: another process did not finish in time.
        """
        self.wait()
        steps = distributed.share("steps", self.steps, timeout=self._timeout)[0]
        if not steps and step is None:
            return None
        step = steps[-1] if step is None else step
        if step not in steps:
            raise InputError(f"{self.folder}: has no step {step}: there are {', '.join(map(str, steps)) or 'none'}")
        ckpt = open_checkpoint(self.folder / str(step))
        changes = [changes] if isinstance(changes, str) else list(changes)
        state = restore_state(ckpt, self._run, changes, budget=budget, timeout=self._timeout)
        self._at = step
        return state

    def save(
        self,
        state: TrainingState,
        *,
        step: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> bool:
        """Begins to save the state if it is due, and returns while it is written; called by every process at each step.

        Waits for the save before, if that is not finished: no more than one copy is ever held. On return the state may
        be donated. After SIGTERM it is saved whether due or not, and written when this returns with `stopping` set.
        A step that this run has saved or restored last is not saved again.

        Args:
            step: the number of steps taken, where the loop knows it: `state.step` is waited for otherwise.
            metrics: numbers of this step, kept in the manifest; `best` names one.
            force: save also if it is not due.

        Returns:
            Whether it is being saved.

        Raises:
            InputError: a state that is not of the declaration; a step that is no whole number; a folder with steps that
                this run has not restored; this save or the one before could not be written; a run that is closed.
            distributed.ProcessTimeout: another process died or fell behind.
        """
        step = checked_step(step_of(state) if step is None else step)
        if self._closed:
            raise InputError(f"save step {step}: the run {self.folder} is closed: save before it ends")
        self.stopping = self.stopping or self._told_to_stop(step)
        if not (self.stopping or force or self._is_due(step)):
            return False
        self.wait()
        if step == self._at:
            return False
        leaves, numbers = self._leaves(state), json_metrics(metrics)
        name = (self._best or "").removeprefix("-")
        fail_if([f"best={name!r} is not among its metrics: pass it"] if name and name not in numbers else [], "save")
        self._give_up_later(step)
        self._saved_at = time.monotonic()
        handle = training_save.start(self._orbax, step, self._job(state, step, leaves, numbers))
        self._before, self._at = self._at, step
        self._finishing = threading.Thread(target=self._finish, args=(handle, step), name="finish save", daemon=True)
        self._finishing.start()
        if self.stopping:
            self.wait()
        return True

    def _give_up_later(self, step: int) -> None:
        """Waits for all processes, and removes steps after the one that was restored: they are of a run given up."""
        steps = distributed.share(f"save step {step}", self.steps, timeout=self._timeout)[0]
        if steps and self._at is None:
            raise InputError(
                f"{self.folder}: holds steps up to {steps[-1]}, and this run has restored none: call restore(),"
                " or choose another folder"
            )
        later = [s for s in steps if self._at is not None and s > self._at]
        if later:
            problem = self._remove(later) if jax.process_index() == 0 else None
            distributed.agree(f"save step {step}", problem, timeout=self._timeout)
            self._orbax.reload()

    def _job(
        self, state: TrainingState, step: int, leaves: dict[str, Array], metrics: dict[str, float | None]
    ) -> training_save.Job:
        """The copy of what this process writes, and what the manifest says of it."""
        run = self._run
        training = about(
            step=step,
            data=json_position(state.data),
            key=state.key,
            mesh=run.mesh,
            declared=run.declared,
            declared_state=run.declared_state,
            trained=run.trained,
            metrics=metrics,
            seconds=time.time(),
        )
        return training_save.Job(
            placed=training_save.place(run.declared, run.declared_state, leaves, self._carried()),
            taken={path: snapshot.take(leaf) for path, leaf in leaves.items()},
            header=self._header or header_of(state.model, run.declared, self._source),
            training=training,
            source=self._source,
            assets={**(self._source.assets if self._source else {}), **self._assets},
            sync=self._sync,
            timeout=self._timeout,
        )

    def _carried(self) -> dict[str, LeafSpec]:
        """The tensors of the source that the model does not run."""
        return {key: leaf.spec for key, leaf in self._source.manifest.carried.items()} if self._source else {}

    def _told_to_stop(self, step: int) -> bool:
        """Whether SIGTERM came, to any process; the same on all, which JAX brings to the same step first."""
        if jax.process_count() == 1:
            return self._terminated.is_set()
        return multihost_utils.reached_preemption_sync_point(step)

    def _is_due(self, step: int) -> bool:
        if self._every is None and self._seconds is None:
            return True
        if self._every is not None and step % self._every == 0:
            return True
        if self._seconds is None:
            return False
        passed = time.monotonic() - self._saved_at >= self._seconds
        return distributed.share("time to save", passed, timeout=self._timeout)[0]

    def _leaves(self, state: TrainingState) -> dict[str, Array]:
        """The arrays of model and optimizer by path, held against their declarations."""
        leaves = live_leaves(state.model, self._run.declared)
        of_state = live_leaves(state.opt_state, self._run.declared_state, "optimizer's state")
        return leaves | {f"{OPT_STATE}/{path}": leaf for path, leaf in of_state.items()}

    def _finish(self, handle: Any, step: int) -> None:
        """Waits for Orbax, then removes the steps that are not kept; what fails is raised by the next `wait`."""
        try:
            handle.result()
            if jax.process_index() == 0:
                training_save.seal(self.folder / str(step), sync=self._sync)
                self._remove_old()
        except BaseException as error:
            if jax.process_index() == 0 and isinstance(error, InputError):  # no process writes any more
                with contextlib.suppress(OSError):
                    self._remove_unfinished()
            self._failure = error

    def _remove_old(self) -> None:
        """Removes the steps that are neither among the last ones nor the best.

        Raises:
            InputError: the storage failed.
        """
        if self._keep is None:
            return
        steps = self.steps
        kept = {*steps[-self._keep :], *self._best_steps(steps)}
        problem = self._remove([step for step in steps if step not in kept])
        fail_if([problem] if problem else [], str(self.folder))

    def _remove(self, steps: list[int]) -> str | None:
        """Removes steps, by another name first, so that none is ever there in part; returns what went wrong."""
        try:
            for step in steps:
                gone = self.folder / f"{step}{REMOVED}"
                os.rename(self.folder / str(step), gone)
                remove_folder(gone)
        except OSError as error:
            return str(storage_error("remove old steps", error, self.folder))
        return None

    def _best_steps(self, steps: list[int]) -> list[int]:
        """The step with the best metric, the latest of those that share it."""
        if self._best is None:
            return []
        name, sign = self._best.removeprefix("-"), -1 if self._best.startswith("-") else 1
        for step in steps:
            if step not in self._metrics:
                training = open_checkpoint(self.folder / str(step)).manifest.training or {}
                self._metrics[step] = training.get("metrics", {}).get(name)
        known = [(sign * value, -step) for step in steps if (value := self._metrics[step]) is not None]
        return [-min(known)[1]] if known else []
