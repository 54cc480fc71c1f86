# SPDX-License-Identifier: Apache-2.0
"""The position in the data, in the same checkpoint as the model, for Lightning's and NeMo's trainers.

    sampler = InterruptableDistributedSampler(dataset, num_replicas=world_size, rank=rank)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    callbacks = [DataProgressCallback(loader), ModelCheckpoint(...)]
    trainer = Trainer(callbacks=callbacks, use_distributed_sampler=False)
    trainer.fit(model, loader, ckpt_path="last")

Invariant: a batch counts when the trainer has made an optimizer step since it began, before any checkpoint
callback saves. So every checkpoint, in the middle of an epoch and of accumulated gradients and after an
exception too, has the position of its model. What no step came after at the end of an epoch waits for one in
the next; a step that a gradient scaler skips is none.

Lightning counts batches by itself: after a restart in the middle of an epoch it takes the first batches of
the epoch for those that follow. Here its count is put to where the position is, on any number of ranks,
before its loops read it.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from resiliency.data.advancing import count_of_batch, optimizer_with_hooks, sampler_of
from resiliency.data.resumable import Loop, warn_of_waiting
from resiliency.data.samplers import InterruptableDistributedSampler
from resiliency.errors import ConfigError


class DataProgressCallback(Callback):
    """Counts what the trainer trained on, and saves and restores where it is. On all ranks alike.

    Args:
        loader: the loader that the fit gets, with a sampler of `resiliency.data`.
    Raises:
        ConfigError: the loader has another sampler, or one with a global batch, whose weights the trainer
            does not know.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self.sampler = sampler_of(loader)
        if (
            isinstance(self.sampler, InterruptableDistributedSampler)
            and self.sampler.global_batch is not None
        ):
            raise ConfigError(
                "the sampler has a global batch, whose micro-batches have weights that no trainer knows.",
                hint="Leave out global_batch, and choose accumulate_grad_batches for the number of ranks.",
            )
        self._batch = count_of_batch(loader, self.sampler)
        self.sampler.has_full_length = True
        self._trainer: Any = None
        self._step = 0
        self._loop = Loop()
        #: Whether an optimizer made a step, as each of them tells; None where one does not tell.
        self._stepped: bool | None = None
        self._hooks: list[Any] = []

    @property
    def state_key(self) -> str:
        return "resiliency.data_progress"

    def state_dict(self) -> dict[str, Any]:
        self._count_step()  # of a batch whose end an exception took away
        return self.sampler.state_dict()

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Put sampler and trainer to where the checkpoint's model is.

        Raises:
            ConfigError: the checkpoint was saved without this callback, or belongs to other data.
        """
        if trainer.state.fn != "fit":
            return
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        if state is None:
            raise ConfigError(
                "the checkpoint does not say where in the data its model is.",
                hint="It was saved without DataProgressCallback. Without the callback, training goes on as "
                "Lightning does: an epoch that was under way begins again, and is cut short.",
            )
        self.sampler.load_state_dict(state)
        if not self._batches_of(self.sampler.left):
            self.sampler.finish_epoch()
            self.sampler.set_epoch(self.sampler.epoch + 1)
        loops = checkpoint.get("loops", {}).get("fit_loop")
        if loops is not None:
            done = self._batches_of(self.sampler.full_length) - self._batches_of(self.sampler.left)
            batches = loops["epoch_loop.batch_progress"]
            batches["current"] = dict.fromkeys(batches["current"], done)
            batches["is_last_batch"] = False
            epoch = self.sampler.epoch
            epochs = loops["epoch_progress"]
            epochs["current"] = dict.fromkeys(epochs["current"], epoch)
            if done:  # so that Lightning takes the epoch for one under way
                epochs["current"] |= {"ready": epoch + 1, "started": epoch + 1}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Raises ConfigError: the trainer trains on another loader, or put another sampler into it."""
        if trainer.train_dataloader is not self._loader:
            raise ConfigError(
                "the trainer does not train on the loader of DataProgressCallback.",
                hint="Pass this loader to fit, and use_distributed_sampler=False to the trainer, which else "
                "puts a sampler of its own into it.",
            )
        self._remove_hooks()
        self._trainer, self._step, self._stepped = trainer, trainer.global_step, False
        try:
            found = [optimizer_with_hooks(optimizer) for optimizer in trainer.optimizers]
        except ConfigError:
            self._stepped = None
            return
        for optimizer in found:
            self._hooks.append(optimizer.register_step_post_hook(self._on_step))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._remove_hooks()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._count_step()
        self._remove_hooks()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._loop.handed_out = 0  # of a fit that failed: the trainer zeroes gradients before the first batch
        self._loop = Loop()
        self.sampler.begin_loop(self._loop)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        self._loop.handed_out += min(self._batch, self.sampler.left - self._loop.handed_out)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Checkpoint callbacks come after this one, as Lightning orders them."""
        self._count_step()
        if trainer.is_last_batch and self.sampler.loop is self._loop:
            # what the loader drops, or the trainer's limits leave out, is left out
            waiting = self.sampler.end_loop()
            if waiting:
                warn_of_waiting(self.sampler.epoch, waiting)

    def _count_step(self) -> None:
        if self._trainer is not None and self._trainer.global_step != self._step:
            self._step = self._trainer.global_step
            if self._stepped is not False and self.sampler.loop is self._loop:
                self.sampler.count_step()
            self._stepped = self._stepped and False

    def _on_step(self, optimizer: Any, *_: Any) -> None:
        # A fused optimizer is called for a step that a gradient scaler skips, and is told so by this.
        if not getattr(optimizer, "found_inf", None):
            self._stepped = True

    def _remove_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _batches_of(self, count: int) -> int:
        if self._batch == 1 or self._loader.drop_last:
            return count // self._batch
        return -(-count // self._batch)
