# SPDX-License-Identifier: Apache-2.0
"""Private names of torch that the persistent format cannot do without; a test watches each.

`.metadata` is a pickle in which torch refers to its own `_StorageInfo`; there is no public name
for it, and a checkpoint that torch reads must hold exactly this class.
"""

from __future__ import annotations

from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION as DCP_VERSION
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo

__all__ = ["DCP_VERSION", "StorageInfo"]
