"""How a model uses its own mesh axes, `tensor`, `expert` and `context`; optimizers that work on whole matrices."""

from jshard.parallel.axes import by_experts as by_experts
from jshard.parallel.axes import from_experts as from_experts
from jshard.parallel.axes import hold as hold
from jshard.parallel.axes import split as split
from jshard.parallel.axes import to_experts as to_experts
