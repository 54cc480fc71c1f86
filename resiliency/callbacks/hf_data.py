# SPDX-License-Identifier: Apache-2.0
"""The same samples in each step for `transformers.Trainer` after a restart, also on another number of ranks.

    class MyTrainer(ResumableDataMixin, Trainer):      # 1: the mixin goes first
        ...
    trainer.train(resume_from_checkpoint=True)         # as before

The idea: the trainer's own checkpoint says how many steps were made (`global_step`). Where a step is made of
the same samples on any number of ranks, that number is the position in the data, and nothing else needs
saving. So the mixin deals samples to ranks so that each step takes the next ones of one order, and refuses a
checkpoint whose number of steps means another position: other data, another seed, another number of samples
in a step. The trainer itself would go on, with some samples twice and others never.

The trainer skips what was trained on as it always does, by the numbers of samples alone: none is loaded.
"""

from __future__ import annotations

import math
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from resiliency.data.progress import check_whole
from resiliency.data.samplers import InterruptableDistributedSampler
from resiliency.errors import ConfigError
from resiliency.progress import report_step, watch_rank


class ResumableDataMixin:
    """For a subclass of `transformers.Trainer`; see the module.  On all ranks alike.

    Raises:
        ConfigError: by `train`: the data or the arguments leave no position to go on from, or that of the
            checkpoint is one in other data or in steps of another size.
    """

    args: Any
    train_dataset: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_callback(DataIdentity)  # type: ignore[attr-defined]

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The trainer's loader, with a sampler that deals this rank its samples: nobody shards it again."""
        _check(self.args, self.train_dataset)
        if self.get_tp_size() > 1:  # type: ignore[attr-defined]
            raise ConfigError("ResumableDataMixin: ranks of tensor parallelism need the same samples.")
        loader: DataLoader[Any] = super().get_train_dataloader()  # type: ignore[misc]
        args = self.args
        sampler = InterruptableDistributedSampler(
            loader.dataset,  # type: ignore[arg-type]  # it has a length, as `_check` has seen
            num_replicas=args.world_size,
            rank=args.process_index,
            shuffle=_is_shuffled(loader),
            seed=args.seed if args.data_seed is None else args.data_seed,
            drop_last=args.dataloader_drop_last,
        )
        return EpochLoader(
            loader.dataset,
            batch_size=args.per_device_train_batch_size,
            sampler=sampler,
            drop_last=args.dataloader_drop_last,
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            worker_init_fn=loader.worker_init_fn,
        )


class EpochLoader(DataLoader[Any]):
    """A loader that the trainer tells the epoch, as it does those of accelerate."""

    sampler: InterruptableDistributedSampler

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)


class DataIdentity(TrainerCallback, ExportableState):
    """What a number of steps means: which data, in which order, how many samples in a step."""

    def __init__(self) -> None:
        self.identity: dict[str, Any] = {}
        self._begun_at = 0

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"identity": self.identity}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raises ConfigError: the checkpoint's steps are not those of this start."""
        watch_rank()
        loader = kwargs["train_dataloader"]
        sampler = loader.sampler
        samples = args.world_size * args.per_device_train_batch_size * args.gradient_accumulation_steps
        steps = math.ceil(len(loader) / args.gradient_accumulation_steps)
        saved = state.stateful_callbacks.get(type(self).__name__)
        if state.global_step:
            _compare(saved, sampler, samples, steps, args)
        self._begun_at = state.global_step
        self.identity = {
            "samples_per_step": samples,
            "steps_per_epoch": steps,
            "order": sampler.progress.at_epoch(0).to_state(),
        }

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        report_step(state.global_step)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raises ConfigError: an epoch was left early, and the number of steps says no more where this is."""
        if state.global_step != self._begun_at and state.global_step % self.identity["steps_per_epoch"]:
            raise ConfigError(
                f"an epoch was left at step {state.global_step}: after a restart the trainer would take it "
                "for one under way.",
                hint="Do not set control.should_epoch_stop; control.should_training_stop may be set.",
            )


def _compare(
    saved: Any, sampler: InterruptableDistributedSampler, samples: int, steps: int, args: Any
) -> None:
    state = saved[-1] if isinstance(saved, list) and saved else saved
    identity = ((state or {}).get("attributes") or {}).get("identity")
    if not identity:
        raise ConfigError(
            "the checkpoint does not say what its steps are made of: ResumableDataMixin did not save it.",
            hint="Train without the mixin to go on as the trainer does, or begin anew.",
        )
    sampler.progress.resume(identity["order"])
    before = check_whole("samples_per_step", identity["samples_per_step"])
    if before != samples:
        raise ConfigError(
            f"the checkpoint's steps have {before} samples, and those of this start {samples} "
            f"({args.world_size} ranks x {args.per_device_train_batch_size} x "
            f"{args.gradient_accumulation_steps}): its step number would mean another position.",
            hint="Choose per_device_train_batch_size and gradient_accumulation_steps for these ranks.",
        )
    if check_whole("steps_per_epoch", identity["steps_per_epoch"]) != steps:
        raise ConfigError(
            f"an epoch had {identity['steps_per_epoch']} steps when the checkpoint was saved, and on "
            f"{args.world_size} ranks it has {steps}.",
            hint="dataloader_drop_last leaves out as much as this number of ranks asks for: go on with the "
            "number of before, or begin without it.",
        )


def _is_shuffled(loader: Any) -> bool:
    """Whether the trainer draws its samples, and does not take them in order.

    Raises:
        ConfigError: it has a sampler that a subclass chose.
    """
    batches = loader.batch_sampler
    while hasattr(batches, "batch_sampler"):  # accelerate's, which deals the batches of another
        batches = batches.batch_sampler
    drawn = getattr(batches, "sampler", None)
    if isinstance(drawn, RandomSampler) and not drawn.replacement:
        return True
    if isinstance(drawn, SequentialSampler):
        return False
    raise ConfigError(
        f"the trainer has a {type(drawn).__name__} of its own, which ResumableDataMixin would replace.",
        hint="Leave out that sampler, or the mixin.",
    )


def _check(args: Any, dataset: Any) -> None:
    """Raises ConfigError where samples are not dealt to ranks by their number in one order."""

    def refuse(what: str, hint: str) -> None:
        raise ConfigError(f"ResumableDataMixin: {what}", hint=hint)

    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        refuse(
            "the train_dataset has no length or is iterable: a position in it is no number.",
            "Use a dataset with a length and samples by number.",
        )
    if args.group_by_length:
        refuse(
            "group_by_length=True orders samples by the trainer's own draw.",
            "Leave it out, or use InterruptableDistributedGroupedBatchSampler in a loop of your own.",
        )
    if args.auto_find_batch_size:
        refuse(
            "auto_find_batch_size=True changes how many samples a step has while it runs.",
            "Set per_device_train_batch_size.",
        )
    if args.n_gpu > 1:
        refuse(
            f"one process trains on {args.n_gpu} GPUs (DataParallel).",
            "Start one process for each GPU, with torchrun or launcher.py.",
        )
    if args.ignore_data_skip:
        refuse("ignore_data_skip=True begins the epoch again at a restart.", "Leave it out.")
    parallelism = getattr(args, "parallelism_config", None)
    if parallelism is not None or getattr(args, "deepspeed", None):
        refuse(
            "ranks that share samples (tensor or context parallelism, DeepSpeed) are not known here.",
            "Use DDP or FSDP without a parallelism_config.",
        )
