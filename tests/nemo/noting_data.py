# SPDX-License-Identifier: Apache-2.0
"""One rank of the benchmark on data that notes which samples each step is made of; it can kill itself.

    python tests/nemo/noting_data.py DIRECTORY STEPS SAMPLES TYPE RAMP DIE_AT

TYPE is Megatron's type of loader, RAMP its three numbers with commas (or "none"). The rank is killed just
after the validation that follows step DIE_AT (0: never). It saves every 2 steps and validates every 3.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

BENCHMARK = Path(__file__).parents[2] / "benchmark"
GLOBAL_BATCH = 8


def main(directory: Path, steps: int, samples: int, kind: str, ramp: str, die_at: int) -> int:
    sys.path.insert(0, str(BENCHMARK))
    import flags
    import pretrain
    from lightning.pytorch.callbacks import Callback

    from resiliency.events import EventStream
    from resiliency.runtime import RunInfo
    from resiliency.testing import MemorySink

    def data(workload: Any) -> Any:
        from mock_data import ResumableMockData

        class Noting(ResumableMockData):
            def setup(self, stage: str = "") -> None:
                super().setup(stage)
                notes = directory / f"rank{os.environ['RANK']}-of-{os.environ['WORLD_SIZE']}.jsonl"
                plain = type(self._train_ds)

                class NotingDataset(plain):  # type: ignore[misc,valid-type]
                    def __getitem__(dataset, number: int) -> Any:
                        with open(notes, "a") as file:
                            file.write(json.dumps([self.trainer.global_step + 1, number]) + "\n")
                        return super().__getitem__(number)

                self._train_ds.__class__ = NotingDataset

        module = Noting(
            seq_length=workload.size.seq_length,
            tokenizer=pretrain._tokenizer(workload),
            micro_batch_size=1,
            global_batch_size=GLOBAL_BATCH,
            rampup_batch_size=None if ramp == "none" else [int(size) for size in ramp.split(",")],
            num_train_samples=samples,
            num_workers=0,
            pin_memory=False,
            create_attention_mask=True,
        )
        module.data_sampler.dataloader_type = kind  # which this module has no argument for
        return module

    class Dying(Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.global_step == die_at:
                trainer.strategy.barrier()  # else the first to die fails the others
                os.kill(os.getpid(), signal.SIGKILL)

    def callbacks(*args: Any) -> list[Any]:
        return [*of_the_benchmark(*args), Dying()]

    def optimizer(workload: Any) -> Any:
        """Not distributed: its state is the same on any number of ranks."""
        module = plain_optimizer(workload)
        module.config.use_distributed_optimizer = False
        return module

    of_the_benchmark, plain_optimizer = pretrain._callbacks, pretrain._optimizer
    pretrain._data, pretrain._callbacks, pretrain._optimizer = data, callbacks, optimizer
    workload = flags.parse(
        [
            *("--device=cpu", "--model=tiny", f"--max-steps={steps}", f"--log-dir={directory / 'logs'}"),
            *(f"--persistent-ckpt-dir={directory}", "--persistent-ckpt-interval=2", "--job-name=noting"),
            *(f"--global-bs={GLOBAL_BATCH}", "--val-check-interval=3", "--limit-val-batches=1"),
            "--log-level=WARNING",
        ]
    )
    info = RunInfo.from_env()
    return int(pretrain.run(workload, info, EventStream(info, [MemorySink()])))


if __name__ == "__main__":
    where, steps, samples, kind, ramp, die_at = sys.argv[1:]
    sys.exit(main(Path(where), int(steps), int(samples), kind, ramp, int(die_at)))
