from jshard import checkpoint as checkpoint
from jshard import kernels as kernels
from jshard import parallel as parallel
from jshard import train as train
from jshard.api.fully_shard import fully_shard as fully_shard
from jshard.api.gradients import value_and_grad as value_and_grad
from jshard.api.init import abstract_init as abstract_init
from jshard.api.init import shard_init as shard_init
from jshard.api.init import shard_optimizer as shard_optimizer
from jshard.api.scan_layers import scan_layers as scan_layers
from jshard.cluster.options import compiler_options as compiler_options
from jshard.engine.context import global_view as global_view
from jshard.engine.per_example import per_example as per_example
from jshard.errors import ShardingError as ShardingError
from jshard.inspect.audit import audit as audit
from jshard.inspect.check import check as check
from jshard.inspect.explain import explain as explain
from jshard.inspect.profile import trace as trace
from jshard.occupancy.overlap import overlap as overlap
from jshard.parallel.owned import owned as owned
from jshard.plans.mesh import mesh as mesh
from jshard.plans.mesh import shard_batch as shard_batch
from jshard.plans.placement import ShardPlacement as ShardPlacement
from jshard.plans.plan import ShardPlan as ShardPlan
from jshard.plans.plan import plan as plan
from jshard.plans.policies import MixedPrecision as MixedPrecision

__version__: str
