"""What a trace of a Linen model shows: which chosen submodules it calls, and with which parameters."""

import dataclasses
from typing import Any

import flax.linen as nn
from flax.linen.transforms import get_module_scopes

from jshard._linen.annotation import Annotation
from jshard._linen.layout import Seen, SeenUnit
from jshard._linen.values import described, flat
from jshard._nnx import Path, dotted


@dataclasses.dataclass(eq=False)
class Survey:
    """Collects the units that a trace of a model calls.

    Args:
        annotation: of the model.
        prefix: path of the model.
        seen: what was found so far.
    """

    annotation: Annotation
    prefix: Path
    seen: Seen = dataclasses.field(default_factory=Seen)

    def note(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Notes a call that has just run: an inner call of the same module, in a loop or a checkpoint, came before."""
        path = module.path[len(self.prefix) :]
        self.seen.called.add(path)
        self.seen.kinds.setdefault(type(module).__name__, dotted(path))
        self._note_loop(module, path)
        choice = self.annotation.match(path, module)
        if choice is None:
            return
        unit = self.seen.units.get(path)
        if unit is None:
            unit = SeenUnit(type(module).__name__, choice, self.annotation.choices[choice][1])
            self.seen.units[path] = unit
        for inner, leaf in flat(module.variables.get("params", {})):
            unit.shapes.setdefault((*path, *inner), described(leaf, (*path, *inner)).shape)
        scopes = {tuple(s.path)[len(self.prefix) :] for s in get_module_scopes(module, args, kwargs)[0]}
        unit.borrowed |= {p for p in scopes if p[: len(path)] != path}

    def _note_loop(self, module: nn.Module, path: Path) -> None:
        """Notes what a layer of a loop sees of its parameters, where the module is what `nn.scan` runs."""
        assert module.scope is not None, "a call that runs the model"
        if any("scan(" in part for part in tuple(module.scope.debug_path)[-1:]):  # Flax's own note of it
            shapes = self.seen.loops.setdefault(path, {})
            for inner, leaf in flat(module.variables.get("params", {})):
                shapes.setdefault((*path, *inner), described(leaf, (*path, *inner)).shape)
