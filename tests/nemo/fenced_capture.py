# SPDX-License-Identifier: Apache-2.0
"""A training whose captures copy nothing before the optimizer is about to step.

``python -m tests.nemo.fenced_capture DIRECTORY`` trains a few steps with the checkpoint process and
holds every copy back until the fence is reached.  It prints, as JSON:

* which of the committed bytes are not those that were there when the save began: without the fence, or
  with one that comes too late, the optimizer has written them by then;
* which parts of each capture differ from those that Megatron builds at that moment: with a tree that is
  used again although it is not true any more, some do.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

BENCHMARK = Path(__file__).parents[2] / "benchmark"
STEPS, EVERY = 8, 2
#: Far beyond a step; a copy that waits longer is dropped, and the save fails.
HELD_S = 60


def main(directory: Path) -> None:
    sys.path.insert(0, str(BENCHMARK))
    import flags
    import pretrain

    from resiliency.events import EventStream
    from resiliency.runtime import RunInfo
    from resiliency.testing import MemorySink

    workload = flags.parse(
        [
            *("--device=cpu", "--model=tiny", f"--max-steps={STEPS}", f"--log-dir={directory / 'logs'}"),
            *(f"--persistent-ckpt-dir={directory}", f"--persistent-ckpt-interval={EVERY}"),
            *("--enable-optimized-async-ckpt", "--job-name=fenced", "--log-level=WARNING"),
        ]
    )
    saved: dict[int, dict[Any, torch.Tensor]] = {}
    record: dict[str, Any] = {"stale": [], "reused": []}
    pretrain._checkpoint_process = lambda workload, events: held_back(workload.checkpoint_dir, saved, record)
    info = RunInfo(job_name="fenced", host="here", run_dir=str(directory))
    code = pretrain.run(workload, info, EventStream(info, [MemorySink()]))
    assert code == 0, code
    result = compare(workload.checkpoint_dir, saved)
    print(json.dumps({**result, "stale": record["stale"], "reused": record["reused"]}))


def held_back(directory: Path, saved: dict[int, Any], record: dict[str, Any]) -> Any:
    """A checkpoint process whose copies start at the fence; what each save began with goes to `saved`."""
    from resiliency.checkpoint import CaptureOptions, CheckpointerOptions
    from resiliency.plugins.min_ckpt_overhead import MinCkptOverheadCheckpointIO
    from resiliency.plugins.persistent_ckpt_proc import PersistentCheckpointProcessIO
    from resiliency.plugins.prepared_state import PreparedState

    at_fence = threading.Event()

    def hold(_: int) -> None:
        assert at_fence.wait(HELD_S), "nobody called the fence"

    class HeldBack(PersistentCheckpointProcessIO):
        def save(self, strategy: Any, checkpoint: dict[str, Any], path: Any, **options: Any) -> None:
            super().wait()  # else storage may be slower than the interval, and a save is skipped
            if checkpoint["global_step"] == STEPS:
                # Nothing trains after it: one parameter may move to other memory.
                parameter = next(strategy.megatron_parallel.parameters())
                parameter.data = parameter.data.clone()
            record["fresh"] = parts_of(built_now(strategy, checkpoint))
            super().save(strategy, checkpoint, path, **options)

        def _begin(self, step: int, state: Any) -> None:
            record["stale"] += differences(step, record["fresh"], parts_of(state))
            if isinstance(self.checkpoint_io._prepared, PreparedState):
                record["reused"].append(step)
            tensors = {k: part for k, part in record["fresh"].items() if isinstance(part, torch.Tensor)}
            saved[step] = {place: data.clone() for place, data in tensors.items()}
            super()._begin(step, state)

        def fence(self) -> None:
            at_fence.set()
            super().fence()
            at_fence.clear()

        def wait(self) -> None:
            at_fence.set()  # behind the last step nobody steps
            super().wait()

        def __deepcopy__(self, memo: object) -> HeldBack:
            return self

    options = CaptureOptions(eager_below_bytes=0, before_piece=hold)
    return HeldBack(MinCkptOverheadCheckpointIO(), directory, options=CheckpointerOptions(capture=options))


def built_now(strategy: Any, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """What would be captured if nothing were used again."""
    from resiliency.plugins.min_ckpt_overhead import MinCkptOverheadCheckpointIO

    whole = {
        **checkpoint,
        "state_dict": OrderedDict(),
        "optimizer_states": {},
        "sharded_state_dict": strategy.megatron_parallel.sharded_state_dict(),
        "optimizer": [strategy.optimizer_sharded_state_dict()],
    }
    metadata = {"content_metadata": strategy.sharded_state_dict_metadata}
    return MinCkptOverheadCheckpointIO().to_capture(whole, metadata)


def parts_of(state: Any) -> dict[Any, Any]:
    """Name and place of each part -> its memory, or what is pickled in it as text."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    from resiliency.checkpoint.state.tensors import sharded_type
    from resiliency.plugins.megatron_values import unpacked

    found = {}
    for part in [*nested_values(state["sharded"]), state["common"]]:
        view = sharded_type(type(part)).describe(part)  # type: ignore[union-attr]
        data = view.data
        key = view.placement.name, view.placement.global_offset
        found[key] = data.detach() if isinstance(data, torch.Tensor) else readable(unpacked(data, str(key)))
    return found


def readable(value: Any) -> str:
    if isinstance(value, dict):  # the order of keys means nothing
        return str(sorted((str(key), readable(item)) for key, item in value.items()))
    return str([readable(item) for item in value]) if isinstance(value, list | tuple) else str(value)


def differences(step: int, fresh: dict[Any, Any], found: dict[Any, Any]) -> list[str]:
    different = [f"step {step}: {key} in one of them only" for key in fresh.keys() ^ found.keys()]
    for key in fresh.keys() & found.keys():
        one, other = fresh[key], found[key]
        same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        if isinstance(one, torch.Tensor):
            same = same and one.data_ptr() == other.data_ptr()
        if not same:
            different.append(f"step {step}: {key}")
    return different


def compare(directory: Path, saved: dict[int, Any]) -> dict[str, Any]:
    from resiliency.checkpoint.format.reader import CheckpointReader
    from resiliency.checkpoint.storage.posix import LocalStorage
    from tests.checkpoint.storage_builders import content_of

    different, compared = [], 0
    for step, tensors in saved.items():
        reader = CheckpointReader(LocalStorage(directory), step)
        reader.verify()
        index = reader.index(0)
        written = {(record.key, record.offsets): record for record in index.tensors}
        for (key, offset), data in tensors.items():
            compared += 1
            if not torch.equal(content_of(directory, step, index, written[key, offset]), data):
                different.append(f"step {step}: {key}")
    first, last = saved[EVERY], saved[STEPS]
    moved = sum(not torch.equal(first[place], last[place]) for place in first)
    return {"steps": sorted(saved), "different": different, "compared": compared, "moved": moved}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
