# SPDX-License-Identifier: Apache-2.0
"""Entry point of the training workload: ``python3 launcher.py ... benchmark/benchmark.py ...``.

It stays this small on purpose.  A Megatron save starts a helper by spawn, and a spawned process
imports the main module again: NeMo imported up here would be imported once more in every rank's
first save.
"""

from __future__ import annotations

import os
import sys
import warnings

from resiliency.errors import ConfigError


def main() -> int:
    """Run one rank.  Exit codes: 0 done, 1 training failed, 2 the flags cannot work, 143 SIGTERM."""
    import command_line
    import flags

    from resiliency.events import EventType
    from resiliency.goodput_measure.tracker import open_event_stream
    from resiliency.runtime import RunInfo, process_start_time

    command_line.build_parser().parse_args()  # --help and unknown flags, before torch is imported
    _silence_import_warnings()
    import torch

    try:
        info = RunInfo.from_env()
    except ConfigError as error:
        return _refuse(error)
    try:
        workload = flags.parse(cuda_devices=torch.cuda.device_count() if torch.cuda.is_available() else 0)
        if workload.checkpoint_dir is not None:
            flags.check_checkpoint_dir(workload.checkpoint_dir, workload.size.checkpoint_bytes())
        if workload.local_checkpoint_dir is not None:
            flags.check_checkpoint_dir(
                workload.local_checkpoint_dir, workload.local_bytes, "--local-ckpt-dir"
            )
        if not workload.log_to_remote_storage:  # a remote directory that fails costs a warning only
            flags.check_writable("--log-dir", workload.log_dir / workload.job_name)
    except ConfigError as error:
        # Once per host: what is wrong may be this host's own disk.
        return 2 if info.local_rank else _refuse(error)
    with open_event_stream(info) as events:
        events.emit(EventType.PROCESS_STARTED, time=process_start_time())
        import pretrain

        return pretrain.run(workload, info, events)


def _refuse(error: ConfigError) -> int:
    print(f"benchmark.py: error: {error}", file=sys.stderr)
    return 2


def _silence_import_warnings() -> None:
    """Torch, NeMo and Megatron warn at import about optional parts that are absent.

    Nobody who starts a training can act on that.  The variable reaches the helper processes that
    Megatron spawns, which import torch again.
    """
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    warnings.filterwarnings("ignore")


if __name__ == "__main__":
    sys.exit(main())
