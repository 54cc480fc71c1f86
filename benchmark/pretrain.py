# SPDX-License-Identifier: Apache-2.0
"""Build NeMo's trainer from a checked `Workload`, and train.  The only heavy import of the benchmark."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from flags import SaveMode, Workload
from log_copier import LogCopier
from random_faults import RankSimulators

from resiliency import log
from resiliency.errors import ResiliencyError
from resiliency.events import EventStream, EventType
from resiliency.runtime import RunInfo
from resiliency.testing import megatron_cpu
from resiliency.testing.faults import FaultInjector

logger = logging.getLogger(__name__)


def run(workload: Workload, info: RunInfo, events: EventStream) -> int:
    """Train one rank to its end.

    Returns:
        The exit code of the process: 0 done, 1 failed (the log says why), 2 cannot run here,
        143 stopped by SIGTERM with its last step not saved (0 if it was).
    """
    log.configure(info, level=workload.log_level)
    try:
        if workload.device == "cpu":
            megatron_cpu.install()
        else:
            megatron_cpu.check_versions()
    except ResiliencyError as error:
        logger.error("%s", error)
        return 2
    _import_stack(workload.log_level)
    log.configure(info, level=workload.log_level)  # NeMo's import adds handlers of its own
    events.emit(EventType.IMPORTED)
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    from resiliency.checkpoint.stop.termination import Terminated

    with _log_directory(workload, info) as log_dir:
        try:
            _train(workload, info, events, log_dir)
        except ResiliencyError as error:
            # Ours say what to do; a traceback would bury it.
            logger.error("%s", error)
            logger.debug("the error came from here", exc_info=True)
            return 1
        except Terminated as terminated:
            return int(terminated.code or 0)  # the log says where it stopped
        except SIGTERMException:  # there are no checkpoints
            # Lightning's exception would end the process with 0, as if training were done.
            logger.warning("stopped by SIGTERM; without a checkpoint directory no step is kept")
            return 128 + signal.SIGTERM
    return 0


def _import_stack(log_level: str) -> None:
    noise = logging.INFO if log_level == "DEBUG" else logging.ERROR
    logging.disable(noise)
    gc.disable()  # collections find nothing among what stays, and take a tenth of the import
    import nemo.collections.llm  # noqa: F401  # everything below it is what the trainer needs
    from nemo.utils import logging as nemo_logging

    gc.freeze()  # nor would those to come
    gc.enable()
    logging.disable(logging.NOTSET)
    nemo_logging.setLevel(noise)
    if log_level != "DEBUG":
        for name in ("lightning", "pytorch_lightning"):  # one greets through the other's logger
            logging.getLogger(f"{name}.utilities.rank_zero").setLevel(logging.WARNING)


def _train(workload: Workload, info: RunInfo, events: EventStream, log_dir: Path) -> None:
    from nemo.collections import llm

    injector = FaultInjector(workload.faults, info, events)
    injector.attach(events)
    simulators = RankSimulators(workload.random_faults, info)
    simulators.attach(events)
    model, data, optimizer = _model(workload), _data(workload), _optimizer(workload)
    trainer = _trainer(workload, info, events, log_dir)
    try:
        llm.train(
            model=model,
            data=data,
            trainer=trainer,
            log=_nemo_logger(log_dir),
            optim=optimizer,
            tokenizer="data",
        )
    finally:
        injector.close()
        simulators.close()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def _tokenizer(workload: Workload) -> Any:
    if workload.tokenizer_path is not None:
        from nemo.collections.common.tokenizers import SentencePieceTokenizer

        return SentencePieceTokenizer(model_path=str(workload.tokenizer_path))
    from byte_tokenizer import ByteTokenizer

    return ByteTokenizer(workload.size.vocab_size)


def _model(workload: Workload) -> Any:
    from nemo.collections.llm.gpt.model.llama import LlamaModel

    from resiliency.model import nemo_config

    config = nemo_config(workload.size, workload.layout, cpu=workload.device == "cpu")
    return LlamaModel(config, tokenizer=_tokenizer(workload))


def _data(workload: Workload) -> Any:
    from mock_data import ResumableMockData

    on_cpu = workload.device == "cpu"
    return ResumableMockData(
        seq_length=workload.size.seq_length,
        tokenizer=_tokenizer(workload),
        micro_batch_size=1,
        global_batch_size=workload.global_batch_size,
        num_train_samples=workload.max_steps * workload.global_batch_size,
        num_workers=0 if on_cpu else 4,
        pin_memory=not on_cpu,
        create_attention_mask=on_cpu,
    )


def _optimizer(workload: Workload) -> Any:
    from megatron.core.optimizer import OptimizerConfig
    from nemo.lightning.pytorch.optim.megatron import MegatronOptimizerModule

    on_cpu = workload.device == "cpu"
    return MegatronOptimizerModule(
        config=OptimizerConfig(
            optimizer="adam",
            lr=1e-3 if on_cpu else 3e-4,
            use_distributed_optimizer=True,
            bf16=not on_cpu,
            params_dtype=torch.float32 if on_cpu else torch.bfloat16,
        )
    )


def _strategy(workload: Workload) -> Any:
    from megatron.core.distributed import DistributedDataParallelConfig
    from nemo import lightning as nl

    from resiliency.plugins.replication_utils import ReplicatedOptimizerMegatronStrategy

    layout, copies = workload.layout, workload.optimizer_replicas
    make: Any = nl.MegatronStrategy
    if copies > 1:
        make = functools.partial(
            ReplicatedOptimizerMegatronStrategy, num_distributed_optimizer_instances=copies
        )
    return make(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline,
        context_parallel_size=layout.context,
        sequence_parallel=layout.tensor > 1 and workload.device != "cpu",
        pipeline_dtype=torch.float32 if workload.device == "cpu" else torch.bfloat16,
        ckpt_async_save=workload.save_mode is SaveMode.ASYNC,
        ddp=DistributedDataParallelConfig(),
    )


def _checkpoint_io(workload: Workload, events: EventStream) -> Any:
    from nemo.utils.callbacks.dist_ckpt_io import AsyncFinalizableCheckpointIO

    from resiliency.plugins.dist_ckpt import VerifiedCheckpointIO

    if workload.save_mode is SaveMode.PROCESS or workload.checkpoint_dir is None:
        return _checkpoint_process(workload, events)
    io: Any = VerifiedCheckpointIO(
        save_ckpt_format="torch_dist",
        async_save=workload.save_mode is SaveMode.ASYNC,
        torch_dist_multiproc=workload.ckpt_threads_per_rank,
        assume_constant_structure=True,
        parallel_save=workload.dist_ckpt,
        parallel_load=workload.dist_ckpt,
    )
    if workload.local_checkpoint_dir is not None:
        from resiliency.plugins.in_cluster_local_ckpt import SplitCheckpointIO

        io = SplitCheckpointIO(io, _checkpoint_process(workload, events))
    return AsyncFinalizableCheckpointIO(io) if workload.save_mode is SaveMode.ASYNC else io


def _checkpoint_process(workload: Workload, events: EventStream) -> Any:
    from resiliency.plugins.in_cluster_local_ckpt import InClusterLocalCheckpointIO
    from resiliency.plugins.min_ckpt_overhead import MinCkptOverheadCheckpointIO
    from resiliency.plugins.persistent_ckpt_proc import PersistentCheckpointProcessIO

    what = MinCkptOverheadCheckpointIO(parallel_save=workload.dist_ckpt, parallel_load=workload.dist_ckpt)
    options = _engine_options(workload)
    by_process = workload.save_mode is SaveMode.PROCESS
    local = _local_tier(workload)
    if local is not None:
        return InClusterLocalCheckpointIO(
            what,
            local,
            persistent_directory=workload.checkpoint_dir if by_process else None,
            keep=workload.topk_ckpt,
            substitutes=workload.load_replication,
            hand_off=_hand_off(workload, events.info),
            events=events,
            options=options,
        )
    return PersistentCheckpointProcessIO(
        what, workload.checkpoint_dir, keep=workload.topk_ckpt, events=events, options=options
    )


def _hand_off(workload: Workload, info: RunInfo) -> Any:
    if not workload.high_scale or workload.local_checkpoint_dir is None:
        return None
    from resiliency.checkpoint.gke.replicated_job import ReplicatedJob
    from resiliency.plugins.hand_off import HandOff

    job = ReplicatedJob.from_run(replace(info, job_name=workload.job_name), workload.local_checkpoint_dir)
    return HandOff(job, is_first=info.local_rank in (None, 0))


def _engine_options(workload: Workload) -> Any:
    from resiliency.checkpoint import CaptureOptions, CheckpointerOptions

    return CheckpointerOptions(capture=CaptureOptions(threads=workload.ckpt_threads_per_rank))


def _local_tier(workload: Workload) -> Any:
    if workload.local_checkpoint_dir is None:
        return None
    from resiliency.checkpoint.trainer.options import LocalTier

    return LocalTier(directory=workload.local_checkpoint_dir, replicas=workload.local_ckpt_replicas)


def _callbacks(workload: Workload, events: EventStream, log_dir: Path) -> list[Any]:
    from nemo.lightning.pytorch.callbacks import GarbageCollectionCallback

    from resiliency.callbacks.consumed_samples import ConsumedSamplesCallback
    from resiliency.callbacks.logging import StepLoggingCallback
    from resiliency.callbacks.run_events import RunEventsCallback

    loss_interval = 1 if workload.device == "cpu" else 10
    callbacks: list[Any] = [
        ConsumedSamplesCallback(),
        RunEventsCallback(events, loss_interval_steps=loss_interval),
        StepLoggingCallback(
            tokens_per_step=workload.global_batch_size * workload.size.seq_length,
            interval_steps=workload.log_interval_steps,
        ),
    ]
    if workload.fault_tolerance:
        from nvidia_resiliency_ext.ptl_resiliency import FaultToleranceCallback

        # Timeouts come from the launcher's flags: those that NVRx calculates only ever grow.
        callbacks.append(
            FaultToleranceCallback(autoresume=False, calculate_timeouts=False, exp_dir=str(log_dir))
        )
    if workload.comm_overlap:
        from resiliency.callbacks.comm_overlap import comm_overlap_callback

        callbacks.append(comm_overlap_callback(workload.layout))
    if workload.gc:
        callbacks.append(GarbageCollectionCallback(gc_interval_train=100, gc_interval_val=100))
    if workload.profile_ckpt_interval is not None:
        from resiliency.callbacks.profile import ProfileCheckpointCallback

        callbacks.append(
            ProfileCheckpointCallback(
                log_dir / "profile",
                interval_steps=workload.profile_ckpt_interval,
                trace_name=workload.trace_name,
            )
        )
    return callbacks + _saving_callbacks(workload, events)


def _saving_callbacks(workload: Workload, events: EventStream) -> list[Any]:
    from resiliency.callbacks.autocheckpoint import AutoCheckpointCallback
    from resiliency.callbacks.model_checkpoint import ModelCheckpoint, Tier

    tiers: list[Any] = []
    if workload.checkpoint_dir is not None and workload.persistent_ckpt_interval is not None:
        tiers.append(
            ModelCheckpoint(
                workload.checkpoint_dir,
                workload.persistent_ckpt_interval,
                # The checkpoint process deletes by itself: it knows what is durable.
                keep=-1 if workload.save_mode is SaveMode.PROCESS else workload.topk_ckpt,
                priority=1,
                events=events,
            )
        )
    if workload.local_checkpoint_dir is not None and workload.local_ckpt_interval is not None:
        tiers.append(
            ModelCheckpoint(
                workload.local_checkpoint_dir, workload.local_ckpt_interval, tier=Tier.LOCAL, events=events
            )
        )
    if not tiers:
        return []
    deadline = timedelta(seconds=workload.termination_deadline_s)
    return [AutoCheckpointCallback(deadline=deadline, events=events), *tiers]


def _trainer(workload: Workload, info: RunInfo, events: EventStream, log_dir: Path) -> Any:
    from nemo import lightning as nl

    on_cpu = workload.device == "cpu"
    plugins: list[Any] = [] if on_cpu else [nl.MegatronMixedPrecision(precision="bf16-mixed")]
    if workload.saves:
        plugins.append(_checkpoint_io(workload, events))
    trainer = nl.Trainer(
        accelerator="cpu" if on_cpu else "gpu",
        devices=workload.ranks_per_node,
        num_nodes=workload.num_nodes,
        max_steps=workload.max_steps,
        max_time={"seconds": workload.max_runtime_s} if workload.max_runtime_s else None,
        val_check_interval=workload.val_check_interval if workload.limit_val_batches else None,
        limit_val_batches=workload.limit_val_batches,
        num_sanity_val_steps=0,
        log_every_n_steps=1 if on_cpu else 10,
        strategy=_strategy(workload),
        plugins=plugins,
        callbacks=_callbacks(workload, events, log_dir),
        enable_checkpointing=workload.saves,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        logger=_tensorboard(log_dir) if workload.tensorboard else False,
    )
    if workload.saves:
        from resiliency.connectors.checkpoint_connector import CheckpointConnector

        trainer._checkpoint_connector = CheckpointConnector(
            trainer, persistent_ckpt_dir=workload.checkpoint_dir, events=events
        )
    return trainer


def _tensorboard(log_dir: Path) -> Any:
    from lightning.pytorch.loggers import TensorBoardLogger

    return TensorBoardLogger(save_dir=str(log_dir), name="tensorboard", version="")


def _nemo_logger(log_dir: Path) -> Any:
    from nemo import lightning as nl

    return nl.NeMoLogger(
        log_dir=str(log_dir / "nemo"), use_datetime_version=False, update_logger_directory=False
    )


@contextlib.contextmanager
def _log_directory(workload: Workload, info: RunInfo) -> Iterator[Path]:
    """The directory for logs, TensorBoard and traces; on this host's disk when --log-dir is remote."""
    final = workload.log_dir / workload.job_name
    if not workload.log_to_remote_storage:
        final.mkdir(parents=True, exist_ok=True)
        yield final
        return
    near = Path(tempfile.mkdtemp(prefix=f"{workload.job_name}-logs-"))
    try:
        with LogCopier(near, final):
            yield near
    finally:
        shutil.rmtree(near, ignore_errors=True)
