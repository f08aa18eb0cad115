"""How a model uses its own mesh axes, `tensor`, `expert` and `context`; stages; optimizers of whole matrices."""

from jshard.parallel.axes import by_experts as by_experts
from jshard.parallel.axes import from_experts as from_experts
from jshard.parallel.axes import hold as hold
from jshard.parallel.axes import split as split
from jshard.parallel.axes import stages as stages
from jshard.parallel.axes import to_experts as to_experts
from jshard.plans.stages import Stages as Stages
