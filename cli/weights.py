"""How generate holds a model's weights: quantized while they are restored, with adapters beside them."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardzoo import checkpoints
from shardzoo.checkpoints.checkpoint import Checkpoint
from shardzoo.convert import adapters as adapter_files
from shardzoo.errors import InputError
from shardzoo.zoo import adapters, quantize


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora:
    """An adapter file as asked for: how much of it, and for which component of a pipeline.

    Without a component it is for the usual one, and every tensor of the file must be; with one, tensors that say that
    they are of another part of the pipeline are left to another `Lora`.
    """

    path: Path
    strength: float = 1.0
    component: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Held:
    """What was asked for.

    Attributes:
        quantize: what weights are quantized to.
        loras: the adapters.
        ignore: which of their tensors to leave out, as `convert.adapters.read` takes it.
    """

    quantize: str | None = None
    loras: tuple[Lora, ...] = ()
    ignore: tuple[str, ...] = ()


def held(quantize: str | None, loras: Sequence[Lora] | None, ignore: Sequence[str] | None) -> Held:
    """What the options say.

    Raises:
        InputError: tensors to leave out, and no adapter.
    """
    if ignore and not loras:
        raise InputError("generate: --lora-ignore does nothing without --lora: leave it out")
    return Held(quantize=quantize, loras=tuple(loras or ()), ignore=tuple(ignore or ()))


class Models:
    """The models of a run as declared before and after they are quantized and get their adapters; files are read.

    Args:
        plain: name -> declaration that a checkpoint is restored by.
        held: what was asked for.
        usual: the name that adapters are for where none is said.
        unquantized: names of models that keep their dtype.

    Raises:
        InputError: adapters that do not fit, or for a model that is not there; nothing to quantize.
    """

    def __init__(self, plain: Mapping[str, Any], held: Held, *, usual: str, unquantized: tuple[str, ...] = ()):
        self._plain, self._kind = plain, held.quantize
        candidates = {name: one for name, one in plain.items() if name not in unquantized}
        self._chosen = {name for name, one in candidates.items() if _quantizable(one, self._kind)}
        if self._kind is not None and not self._chosen:
            raise InputError(f"generate: there is nothing to quantize to {self._kind} in {', '.join(plain)}")
        self._bare = {
            name: quantize.declare(one, self._kind) if self._kind and name in self._chosen else one
            for name, one in plain.items()
        }
        self._adapters = self._read(held, usual)
        self.declared = {name: adapters.declare(one, self._adapters.get(name, ())) for name, one in self._bare.items()}

    def _read(self, held: Held, usual: str) -> dict[str, list[adapters.Adapter]]:
        found: dict[str, list[adapters.Adapter]] = {}
        for number, lora in enumerate(held.loras):
            name = lora.component or usual
            if name not in self._plain:
                there = ", ".join(self._plain)
                raise InputError(f"--lora {lora.path}: there is no component {name!r}: there are {there}")
            bare = self._bare[name]
            loaded = adapter_files.read(
                lora.path, bare, strength=lora.strength, component=lora.component, ignore=held.ignore
            )
            mine = found.setdefault(name, [])
            twice = loaded.name in [one.name for one in mine]
            mine.append(dataclasses.replace(loaded, name=f"{loaded.name[:50]}-{number}") if twice else loaded)
        return found

    def restore(self, name: str, checkpoint: Checkpoint, mesh: Any, **options: Any) -> Any:
        """The live model, quantized as it is read, with its adapters beside it; `options` are those of `restore`."""
        kind = self._kind if name in self._chosen else None
        model = checkpoints.restore(checkpoint, mesh, declared=self._plain[name], quantize=kind, **options)
        return adapters.attach(self._bare[name], model, mesh, self._adapters.get(name, ()))[1]


def _quantizable(declared: Any, kind: str | None) -> bool:
    return kind is not None and bool(quantize.quantizable(declared, kind))
