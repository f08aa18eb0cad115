"""What a trace of a Linen model shows: which chosen submodules it calls, and with which parameters.

A Linen module has no submodules before it runs, so the units of a model are found by a trace: that of `init`, or one of
shapes alone for a call with parameters that no `init` was traced for.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import flax.linen as nn
from flax.linen.transforms import get_module_scopes
from flax.nnx.filterlib import Filter

from jshard.linen.choices import ChosenUnits, first_match
from jshard.linen.parameters import described, placeable
from jshard.plans import checks
from jshard.plans.plan import Leaf
from jshard.plans.units import Path, Unit, dotted, inside

Shapes = dict[Path, tuple[int, ...]]
"""Of parameters, by path from the annotated module, as a call reads them: without the layers of a loop around it."""


@dataclasses.dataclass
class SeenUnit:
    """A chosen submodule, as found by a trace.

    Attributes:
        record: the settings of its choice, with its own class.
        choice: the index of its choice.
        shapes: of one layer of its parameters.
        borrowed: modules from elsewhere that it received as arguments or fields, and may use.
    """

    record: Unit
    choice: int
    shapes: Shapes = dataclasses.field(default_factory=dict)
    borrowed: set[Path] = dataclasses.field(default_factory=set)


# By identity: a survey is part of jit's cache key while it is made, and still changes then.
@dataclasses.dataclass(eq=False)
class Survey:
    """Findings of a trace of a model.

    Attributes:
        choices: which submodules are units.
        prefix: the path of the model; the other paths start there.
        units: the units.
        loops: of each module that runs as a loop's body, the shapes of one layer of its parameters.
        kinds: a path of each class of module, for messages.
        called: every module called.
    """

    choices: Sequence[ChosenUnits]
    prefix: Path
    units: dict[Path, SeenUnit] = dataclasses.field(default_factory=dict)
    loops: dict[Path, Shapes] = dataclasses.field(default_factory=dict)
    kinds: dict[str, str] = dataclasses.field(default_factory=dict)
    called: set[Path] = dataclasses.field(default_factory=set)

    def record_call(self, module: nn.Module, args: tuple, kwargs: dict[str, object]) -> None:
        """Records a call that has just run.

        Inner calls of the same module, in a loop or a checkpoint, came before. So the first shapes are those of the
        innermost call, which reads one layer.
        """
        path = module.path[len(self.prefix) :]
        self.called.add(path)
        self.kinds.setdefault(type(module).__name__, dotted(path))
        if _is_loop_body(module):
            _add_shapes(self.loops.setdefault(path, {}), module, path)
        choice = first_match(self.choices, path, module)
        if choice is None:
            return
        if path not in self.units:
            # Of its own class: a pattern may choose modules of several classes.
            record = dataclasses.replace(self.choices[choice].record, kind=type(module).__name__)
            self.units[path] = SeenUnit(record, choice)
        unit = self.units[path]
        _add_shapes(unit.shapes, module, path)
        # By the function that `call_lifted` uses: these are the scopes that the unit's call will lift.
        for scope in get_module_scopes(module, args, kwargs)[0]:
            scope_path = tuple(scope.path)[len(self.prefix) :]
            if inside(path, scope_path) is None:
                unit.borrowed.add(scope_path)

    def check(self, kind: str, leaves: Mapping[Path, Leaf], ignored: Filter) -> None:
        """Raises for a choice of units, or a pattern of ignored parameters, that matches nothing in the model.

        Args:
            kind: the class of the model, for messages.
            leaves: the parameters of the model.
            ignored: the patterns.
        """
        used = {unit.choice for unit in self.units.values()}
        unused = [chosen_units.text for i, chosen_units in enumerate(self.choices) if i not in used]
        if unused:
            raise checks.no_unit_chosen(kind, ", ".join(unused), self.kinds, "block_*")
        # A pattern may match a path from the model, or from a unit.
        names = set()
        for unit_path in [(), *self.units]:
            for path in leaves:
                relative = inside(unit_path, path)
                if relative is not None:
                    names.add(dotted(relative))
        checks.check_patterns_used(ignored, names)


def _is_loop_body(module: nn.Module) -> bool:
    """Returns whether a module runs as the body of `nn.scan`, by the name that Flax gives to its scope."""
    assert module.scope is not None, "a call that runs the model"
    # Only the last part: further out it would be the loop around a module that contains this one.
    return any("scan(" in part for part in tuple(module.scope.debug_path)[-1:])


def _add_shapes(shapes: Shapes, module: nn.Module, path: Path) -> None:
    for relative, leaf in placeable(module.variables):
        full_path = (*path, *relative)
        # The first shape stays, see `record_call`.
        shapes.setdefault(full_path, described(leaf, full_path).shape)
