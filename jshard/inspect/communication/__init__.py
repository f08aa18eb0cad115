"""The communication of a plan in a step, and descriptions of how a compiled program differs from it.

Modules, from the bottom up:

    of_parameter   the collectives that follow from how one parameter is placed
    staged         those of loops on pipeline stages
    planned        the collectives that follow from a plan
    attribution    which collectives of a program the plan is about: not those of units that are never gathered, and
                   not those of lines that mix examples
    comparison     where a program communicates differently from its plan, as sentences
"""

from jshard.inspect.communication.attribution import gathered_anyway as gathered_anyway
from jshard.inspect.communication.attribution import split_by_plan as split_by_plan
from jshard.inspect.communication.attribution import without_mixing as without_mixing
from jshard.inspect.communication.comparison import CPU as CPU
from jshard.inspect.communication.comparison import TPU as TPU
from jshard.inspect.communication.comparison import Difference as Difference
from jshard.inspect.communication.comparison import differences as differences
from jshard.inspect.communication.comparison import hlo_dtype as hlo_dtype
from jshard.inspect.communication.of_parameter import BACKWARD as BACKWARD
from jshard.inspect.communication.of_parameter import FORWARD as FORWARD
from jshard.inspect.communication.of_parameter import Traffic as Traffic
from jshard.inspect.communication.planned import traffic_of as traffic_of
from jshard.inspect.communication.planned import unit_traffic as unit_traffic
