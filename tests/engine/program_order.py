"""Reads from a traced program what each operation waits for, after the pruning that XLA does."""

import dataclasses
import re
from typing import Any

from jax.extend import core as jex


@dataclasses.dataclass(eq=False)
class Node:
    """An operation of the sharded region, loops and calls opened."""

    kind: str
    unit: str
    backward: bool
    inputs: list[Any]
    outputs: list[Any]


def opened(jaxpr: Any, args: list[Any], nodes: list[Node], scope: str = "") -> list[Any]:
    """Adds the operations of a jaxpr, those of calls inside in their place; values are objects. Returns its results."""
    values = dict(zip(jaxpr.invars, args, strict=True)) | {v: object() for v in jaxpr.constvars}
    look = lambda v: None if isinstance(v, jex.Literal) else values[v]
    for eqn in jaxpr.eqns:
        where = f"{scope}/{eqn.source_info.name_stack}"
        ins = [look(a) for a in eqn.invars]
        inner = [j for j in jex.jaxprs_in_params(eqn.params) if len(j.invars) == len(ins)]
        if inner and eqn.primitive.name not in ("scan", "while", "cond"):
            outs = opened(inner[0], ins, nodes, where)
        else:
            unit = re.findall(r"jshard\[([^\]]*)\]", where)
            outs = [object() for _ in eqn.outvars]
            nodes.append(Node(eqn.primitive.name, unit[-1] if unit else "", "/backward" in where, ins, outs))
        values |= dict(zip(eqn.outvars, outs, strict=True))
    return [look(v) for v in jaxpr.outvars]


def regions(jaxpr: Any) -> list[Any]:
    found = []
    for eqn in jaxpr.eqns:
        for inner in jex.jaxprs_in_params(eqn.params):
            found += [inner] if eqn.primitive.name == "shard_map" else regions(inner)
    return found


class Region:
    """What each operation waits for, after XLA's pruning."""

    def __init__(self, jaxpr: Any) -> None:
        self.nodes: list[Node] = []
        arguments = [object() for _ in jaxpr.invars]
        self.activations = [v for v, invar in zip(arguments, jaxpr.invars, strict=True) if invar.aval.ndim == 3]
        self.vectors = [v for v, invar in zip(arguments, jaxpr.invars, strict=True) if invar.aval.ndim == 1]
        self.results = opened(jaxpr, arguments, self.nodes)
        live = set(self.results)
        edges = {}
        for node in reversed(self.nodes):
            if not any(v in live for v in node.outputs):
                continue
            if node.kind == "optimization_barrier":
                kept = [a for a, v in zip(node.inputs, node.outputs, strict=True) if v in live]
            else:
                kept = node.inputs
            edges[id(node)] = [a for a in kept if a is not None]
            live.update(edges[id(node)])
        made = {v: node for node in self.nodes for v in node.outputs}
        self._before: dict[int, frozenset[int]] = {}
        for node in self.nodes:  # in order: what a node waits for comes before it
            parents = [made[v] for v in edges.get(id(node), []) if v in made]
            self._before[id(node)] = frozenset().union(*({id(p)} | self._before[id(p)] for p in parents))
        self.live = [n for n in self.nodes if id(n) in edges]

    def find(self, kind: str, unit: str, backward: bool = False) -> list[Node]:
        return [n for n in self.live if (n.kind, n.unit, n.backward) == (kind, unit, backward)]

    def of_kind(self, kind: str) -> list[Node]:
        return [n for n in self.live if n.kind == kind]

    def waits_for(self, node: Node, others: list[Node]) -> bool:
        return any(id(other) in self._before[id(node)] for other in others)
