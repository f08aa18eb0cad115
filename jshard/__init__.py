"""jshard: annotate a Flax model, and it trains fully sharded, with communication that is shown.

Example:
    >>> import jshard as js
"""

import typing as _typing

from jshard import checkpoint as checkpoint
from jshard import kernels as kernels
from jshard import parallel as parallel
from jshard._annotate import fully_shard as fully_shard
from jshard._errors import AnnotationError as AnnotationError
from jshard._errors import CallError as CallError
from jshard._errors import MeshError as MeshError
from jshard._errors import RunError as RunError
from jshard._errors import ShardingError as ShardingError
from jshard._init import abstract_init as abstract_init
from jshard._init import shard_init as shard_init
from jshard._mesh import mesh as mesh
from jshard._mesh import shard_batch as shard_batch
from jshard._optimizer import shard_optimizer as shard_optimizer
from jshard._plan import LeafPlan as LeafPlan
from jshard._plan import ShardPlan as ShardPlan
from jshard._plan import UnitPlan as UnitPlan
from jshard._plan import plan as plan
from jshard._policies import MixedPrecision as MixedPrecision
from jshard._strategies import Strategy as Strategy
from jshard._strategies import strategies as strategies
from jshard.cluster.options import compiler_options as compiler_options
from jshard.engine.accumulate import value_and_grad as value_and_grad
from jshard.engine.context import global_view as global_view
from jshard.engine.outputs import batch_mean as batch_mean
from jshard.engine.outputs import per_shard as per_shard
from jshard.engine.scan import scan_layers as scan_layers
from jshard.inspect.audit import audit as audit
from jshard.inspect.check import check as check
from jshard.inspect.explain import Explanation as Explanation
from jshard.inspect.explain import explain as explain
from jshard.inspect.profile.trace import trace as trace
from jshard.kernels.shaping import overlap as overlap

if _typing.TYPE_CHECKING:
    from jshard import train as train

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """`js.train` is there without an import of its own, and costs nothing until it is used."""
    if name == "train":
        import importlib

        return importlib.import_module("jshard.train")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
