# SPDX-License-Identifier: Apache-2.0
"""NeMo's distributed checkpoint, with checksums and with the random state.

`VerifiedCheckpointIO` is NeMo's `MegatronCheckpointIO`: the files are NeMo's own and open with
stock NeMo and ``megatron.core.dist_checkpointing``.  It adds two things that a bit-identical
resume needs:

* checksums of every file, written by whoever wrote the file (in an async save: in the background
  process), and a manifest that rank 0 writes last (`resiliency.checkpoint.format.nemo`);
* every rank's random number generators, as one more sharded object.  NeMo 2.7 saves none, so a
  model with dropout resumes on another stream of random numbers.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from nemo.lightning.ckpt_utils import ckpt_to_dir
from nemo.lightning.io.pl import MegatronCheckpointIO
from torch.distributed.checkpoint.api import CheckpointException

from resiliency.checkpoint.format import nemo
from resiliency.errors import CheckpointCorrupt, CheckpointWriteFailed, LayoutMismatch
from resiliency.files import posix_path
from resiliency.plugins import checkpoint_kinds
from resiliency.plugins.random_states import rng_state

logger = logging.getLogger(__name__)

RNG_KEY = "resiliency_rng"
#: The form in which the distributed optimizer is saved as it lies in memory, in buckets, without talking to
#: other ranks; NeMo's default.
IN_PLACE = "dp_reshardable"
#: How the keys of that form begin.
_BUCKETS = "optimizer.distributed.dp_group_idx_"
#: What is raised for a write that failed: by Python, by Megatron, and by the engine's storage.
_REFUSED = (
    OSError,
    CheckpointException,
    CheckpointingException,
    CheckpointWriteFailed,
    CheckpointCorrupt,
)


class VerifiedCheckpointIO(MegatronCheckpointIO):
    """`MegatronCheckpointIO` whose checkpoints can be proven whole; same arguments.

    After `load_checkpoint`, `restored_rng` holds the random state to set just before the first
    step (None when the checkpoint has none for this world size): setting it earlier would be
    undone by the random numbers that data loaders draw when they start.
    """

    restored_rng: dict[str, Any] | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> AsyncRequest | None:
        """Save; in an async save return the request whose background part also records checksums.

        Raises:
            CheckpointWriteFailed: storage refused the bytes; what was committed before is untouched.
        """
        directory = Path(ckpt_to_dir(posix_path(path)))
        step = int(checkpoint["global_step"])
        checkpoint = checkpoint | {RNG_KEY: sharded_per_rank(rng_state())}
        with _write_errors(directory, step):
            request = super().save_checkpoint(checkpoint, path, storage_options)
            if request is None:
                nemo.record_rank(directory, step=step, rank=dist.get_rank())
                dist.barrier()
                _seal(directory, step)
                return None
        return _proven(request, directory, step)

    def load_checkpoint(
        self, path: str | Path, sharded_state_dict: Any = None, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Load, and keep this rank's random state for later in `restored_rng`; collective.

        Raises:
            LayoutMismatch: on all ranks; the form of the optimizer cannot be cut anew for this layout.
        """
        wanted = dict(sharded_state_dict)
        if checkpoint_kinds.saved_ranks_together(_checkpoint_dir(Path(path))) == dist.get_world_size():
            wanted[RNG_KEY] = sharded_per_rank(None)
        else:
            logger.warning(
                "%s has no random state for %d ranks; it is drawn anew", path, dist.get_world_size()
            )
        with _form_errors(path):
            checkpoint: dict[str, Any] = super().load_checkpoint(path, wanted, *args, **kwargs)
        self.restored_rng = checkpoint.pop(RNG_KEY, None)
        return checkpoint


def sharded_per_rank(state: dict[str, Any] | None, place: tuple[int, int] | None = None) -> ShardedObject:
    """The random state of a rank; None asks for it.

    Args:
        place: that rank and the number of ranks; None: this one.
    """
    rank, world_size = place or (dist.get_rank(), dist.get_world_size())
    return ShardedObject(RNG_KEY, state, (world_size,), (rank,))


def _checkpoint_dir(path: Path) -> Path:
    return path.parent if path.name == nemo.WEIGHTS else path


def _proven(request: AsyncRequest, directory: Path, step: int) -> AsyncRequest:
    """`request`, with checksums in its background part and the manifest as its last act."""

    def mapped(finalize: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            with _write_errors(directory, step):
                finalize()

        return call

    write = request.async_fn
    finalize_fns = [*request.finalize_fns, functools.partial(_seal, directory, step)]
    return request._replace(
        async_fn=write and functools.partial(_write_then_record, write, directory, step, dist.get_rank()),
        finalize_fns=[mapped(finalize) for finalize in finalize_fns],
    )


def _write_then_record(
    write: Callable[..., None], directory: Path, step: int, rank: int, *args: Any, **kwargs: Any
) -> None:
    write(*args, **kwargs)
    nemo.record_rank(directory, step=step, rank=rank)


@contextlib.contextmanager
def _form_errors(path: str | Path) -> Iterator[None]:
    """Say what the form of the optimizer cannot do, where Megatron finds buckets of other sizes.

    It compares them while ranks plan what to read, so nothing was read, and torch tells all ranks of a
    failure of any: this raises on all of them.
    """
    try:
        yield
    except CheckpointException as error:
        cause = _root_cause(error)
        if _BUCKETS not in cause:
            raise
        raise LayoutMismatch(
            f"{path} holds the optimizer in the form {IN_PLACE}, for another tensor, pipeline or expert"
            " parallel layout; this form can be cut anew for other numbers of data-parallel ranks only"
            f" ({cause}).",
            hint="Start with the layout that saved it.  To go on with another one, save from there with"
            " MegatronStrategy(ckpt_optim_fully_reshardable=True) first.",
            path=str(path),
        ) from error


@contextlib.contextmanager
def _write_errors(directory: Path, step: int) -> Iterator[None]:
    """Map what Megatron and the operating system raise for a failed write, in this one place."""
    try:
        yield
    except _REFUSED as error:
        raise CheckpointWriteFailed(
            f"checkpoint of step {step} could not be written to {directory}, where "
            f"{_free_bytes(directory)} bytes are free: {_root_cause(error)}.",
            hint="Free space or mend the storage, then start the job again; it goes on from the checkpoint "
            "before, which was not touched.",
            step=step,
            path=str(directory),
        ) from error


def _free_bytes(directory: Path) -> str:
    try:
        return f"{shutil.disk_usage(directory.parent).free:,}"
    except OSError:  # the storage that just failed may not answer this either
        return "an unknown number of"


def _root_cause(error: BaseException) -> str:
    """The first failure of any rank, in a line; torch's own text is only "CheckpointException ranks"."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = sorted(error.failures.items())[0]
        return f"rank {rank}: {type(cause).__name__}: {cause}"
    return f"{type(error).__name__}: {error}"


def is_rank_zero() -> bool:
    """True in global rank 0, and where no process group exists."""
    return not dist.is_initialized() or dist.get_rank() == 0


def _seal(directory: Path, step: int) -> None:
    if is_rank_zero():
        nemo.seal(directory, step=step, world_size=dist.get_world_size())
