# SPDX-License-Identifier: Apache-2.0
"""Saves through torch's process executor: steps 1, 1 again (which is refused) and 3."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from resiliency.checkpoint.torch_dcp import DcpStorageWriter
from tests.checkpoint.dcp_saves import small_state


def main(root: Path) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.FileStore(str(root / "store"), 1), rank=0, world_size=1)
    writer = DcpStorageWriter()
    for step in (1, 1, 3):
        future = dcp.async_save(
            small_state(step),
            checkpoint_id=root / f"step={step}",
            storage_writer=writer,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        try:
            future.result(timeout=120)
            print("saved", flush=True)
        except CheckpointException as error:
            print("refused" if "is a complete checkpoint already" in str(error) else error, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
