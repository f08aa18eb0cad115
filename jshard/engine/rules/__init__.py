"""How each primitive is computed on one data shard.

A program is traced in global view, for the whole batch, and runs on shards: `jshard.engine.partitioner` goes through
its equations, and looks up how the result of each comes from what the shards have. Every value has a state (whole,
split along a dim, partial, stored), and a rule maps the states of operands to those of results:

    y = x @ w          x split along the batch, w whole        y is split along the batch     nothing is sent
    g = x.T @ dy       both split along what is contracted     g is partial                   nothing is sent yet
    g + h              both partial                            the sum is partial: it is linear
    tanh(g)            partial                                 g is summed before: an all-reduce
    x - x.mean(0)      the mean is a sum over the split dim    partial, then summed and whole

Invariants:

* Without a rule, or if a rule returns None, operands are gathered and every device computes the equation whole. This is
  slower and never wrong, so a rule returns None in every case that it does not understand.
* What is recorded as linear must be linear: it is the one fact that makes results wrong if it is (see `Linear`).
* The array of a result has the shape of a shard by its state. The partitioner examines that for each equation.
* A rule emits collectives only by the partitioner's conversions (`whole`, `split`, `partial`), or in `p.sends`: else
  what a model sends would be reported incompletely.

Modules, from the bottom up:

    values           values and their states
    registry         one record for each primitive, and the decorators that enter facts into it
    building_blocks  steps that rules share
    calls            equations that hold a program
    linear           equations on partial operands
    index_dims       indices that count up along a dim
    keys, elementwise, shapes, indexing, products, reductions, along_dims    rules
    data_free        values known without data
    loops            loops and branches
    opaque_calls, shard_maps, collectives, effects                           rules

`docs/adding_a_rule.md` adds a primitive, step by step.
"""

from jshard.engine.rules.building_blocks import same, traced
from jshard.engine.rules.calls import CALLS, opened, operands, program
from jshard.engine.rules.registry import (
    IN_ALL,
    IN_EITHER,
    IN_FIRST,
    PRIMITIVES,
    DataFree,
    Linear,
    OperandStates,
    Partitioner,
    PrimitiveRecord,
    inverse_rule,
    record_of,
    rule,
)
from jshard.engine.rules.values import PARTIAL, Provenance, Shard, Staged, State, Value, array_bytes, type_of

__all__ = [
    "CALLS",
    "IN_ALL",
    "IN_EITHER",
    "IN_FIRST",
    "PARTIAL",
    "PRIMITIVES",
    "DataFree",
    "Linear",
    "OperandStates",
    "Partitioner",
    "PrimitiveRecord",
    "Provenance",
    "Shard",
    "Staged",
    "State",
    "Value",
    "array_bytes",
    "inverse_rule",
    "opened",
    "operands",
    "program",
    "record_of",
    "rule",
    "same",
    "traced",
    "type_of",
]
