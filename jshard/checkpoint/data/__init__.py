"""Where a run is in its data, told so that any mesh, any number of processes and any batch size can go on from there.

Example:
    >>> samples = grain.MapDataset.source(photos).shuffle(seed=0).repeat()
    >>> batches = GlobalBatches(samples, batch_size=512, rows=mesh)
    >>> js.checkpoint.save("run/100", {"model": model, "data": batches})
"""

from jshard.checkpoint.data.global_batches import GlobalBatches as GlobalBatches
from jshard.checkpoint.data.packed_batches import PackedBatches as PackedBatches
from jshard.checkpoint.data.position import DataPosition as DataPosition
from jshard.checkpoint.data.position import check_position as check_position
from jshard.checkpoint.data.position import is_data_position as is_data_position
from jshard.checkpoint.data.position import position_text as position_text
from jshard.checkpoint.data.position import set_position as set_position
