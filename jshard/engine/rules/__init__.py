"""The table: for each primitive, how the states of its operands flow to its results.

`RULES[name]` is called with operands of which one at least is split and none is partial. It returns the results, or
None where a shard cannot compute its part alone: then the operands are gathered and the equation is computed whole.
"""

from jshard.engine.rules import calls as calls
from jshard.engine.rules import contraction as contraction
from jshard.engine.rules import effects as effects
from jshard.engine.rules import indexing as indexing
from jshard.engine.rules import loops as loops
from jshard.engine.rules import opaque as opaque
from jshard.engine.rules import reductions as reductions
from jshard.engine.rules import shapes as shapes
from jshard.engine.rules.table import RULES as RULES
from jshard.engine.rules.table import rule as rule
