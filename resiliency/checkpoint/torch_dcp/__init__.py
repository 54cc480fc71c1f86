# SPDX-License-Identifier: Apache-2.0
"""For programs that use `torch.distributed.checkpoint` itself and keep their own handling of state.

    dcp.save(state, storage_writer=DcpStorageWriter("/ckpt/step=100", keep=3))
    dcp.load(state, storage_reader=DcpStorageReader("/ckpt/step=100"))

Both are torch's own interfaces: planners, process groups, `async_save` and resharding stay torch's.
"""

from resiliency.checkpoint.torch_dcp.reader import DcpStorageReader
from resiliency.checkpoint.torch_dcp.writer import DcpStorageWriter

__all__ = ["DcpStorageReader", "DcpStorageWriter"]
