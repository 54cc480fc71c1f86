# SPDX-License-Identifier: Apache-2.0
"""Private names of torch that the persistent format cannot do without; a test watches each.

`.metadata` is a pickle in which torch refers to its own `_StorageInfo`; there is no public name
for it, and a checkpoint that torch reads must hold exactly this class.  `_StoragePrefix` is what
torch's own writer expects in save plans that were cached.
"""

from __future__ import annotations

from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION as DCP_VERSION
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.filesystem import _StoragePrefix as StoragePrefix

__all__ = ["DCP_VERSION", "StorageInfo", "StoragePrefix"]
