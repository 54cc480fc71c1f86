# SPDX-License-Identifier: Apache-2.0
"""Data that survives: every sample once per epoch, whatever happens to hosts and ranks.

The position in an epoch's order belongs to the checkpoint, next to the model that was trained on what is
before it. It is the same plain number on all ranks, so any number of ranks goes on from it. See docs/data.md.

Nothing here knows checkpoints or launchers: a sampler is an object with `state_dict` in the state that is
saved.
"""

from resiliency.data.advancing import OptimizerStep, advancing, advancing_steps
from resiliency.data.dispatch.book import Answer, Book, StaleRange
from resiliency.data.dispatch.client import DataClient
from resiliency.data.dispatch.failures import BrokenWorker, PoisonedRange, PoisonPolicy
from resiliency.data.dispatch.ranges import PartitionRanges, SampleRange, SampleRanges, TextRanges
from resiliency.data.dispatch.sampler import DispatchedSampler, sizes_of, text_records
from resiliency.data.dispatch.server import DataServer
from resiliency.data.global_batch import GlobalBatch, MicroBatch, RampUp, accumulate
from resiliency.data.grouped import InterruptableDistributedGroupedBatchSampler
from resiliency.data.iterable import ResumableIterable
from resiliency.data.metrics import MetricsTracker
from resiliency.data.mixing import MixedDataset, MixedSampler
from resiliency.data.order import EpochOrder, sample_seed
from resiliency.data.progress import Progress
from resiliency.data.samplers import InterruptableDistributedSampler, InterruptableSampler, MicroBatchSampler
from resiliency.data.saving import AtomicDirectory, atomic_torch_save
from resiliency.data.sharded_dataset import DistributedShardedDataset
from resiliency.data.timing import TimestampedTimer

# The other spelling, which the README of cycling_utils uses.
InterruptibleSampler = InterruptableSampler
InterruptibleDistributedSampler = InterruptableDistributedSampler
InterruptibleDistributedGroupedBatchSampler = InterruptableDistributedGroupedBatchSampler

__all__ = [
    "Answer",
    "AtomicDirectory",
    "Book",
    "BrokenWorker",
    "DataClient",
    "DataServer",
    "DispatchedSampler",
    "DistributedShardedDataset",
    "EpochOrder",
    "GlobalBatch",
    "InterruptableDistributedGroupedBatchSampler",
    "InterruptableDistributedSampler",
    "InterruptableSampler",
    "InterruptibleDistributedGroupedBatchSampler",
    "InterruptibleDistributedSampler",
    "InterruptibleSampler",
    "MetricsTracker",
    "MicroBatch",
    "MicroBatchSampler",
    "MixedDataset",
    "MixedSampler",
    "OptimizerStep",
    "PartitionRanges",
    "PoisonPolicy",
    "PoisonedRange",
    "Progress",
    "RampUp",
    "ResumableIterable",
    "SampleRange",
    "SampleRanges",
    "StaleRange",
    "TextRanges",
    "TimestampedTimer",
    "accumulate",
    "advancing",
    "advancing_steps",
    "atomic_torch_save",
    "sample_seed",
    "sizes_of",
    "text_records",
]
