# SPDX-License-Identifier: Apache-2.0
"""Megatron's states through the checkpoint engine: stock Megatron reads them, and so do we, bit for bit.

Real Megatron models and distributed optimizers on gloo ranks; stock Megatron runs in processes that
never import this project.  The model has SwiGLU layers (factories), an object per rank, an object that
is not persistent, and flattened ranges where the optimizer's form has them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from resiliency.checkpoint.capture.job_memory import DEFAULT_ROOT
from resiliency.checkpoint.format.catalog import Condition, inspect
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.testing.processes import Command
from resiliency.testing.rank_pool import RankPool
from tests.checkpoint.storage_builders import file_in
from tests.plugins import megatron_ranks
from tests.plugins.conftest import JOB_S, run
from tests.plugins.megatron_ranks import BUCKET_SPACE, MODEL_SPACE, STEP, Layout, Part, differing

pytestmark = [pytest.mark.nemo, pytest.mark.slow, pytest.mark.usefixtures("agents_at_once")]

TWO_REPLICAS = Layout(ranks=2)
TENSOR_PARALLEL = Layout(ranks=2, tensor=2)
ONE_RANK = Layout()
BUCKETS = Layout(ranks=2, sharding=BUCKET_SPACE)
GATHERED = Layout(ranks=2, sharding="fully_reshardable")
#: In fp32 the main parameters are the model's own memory.
FULL_PRECISION = Layout(ranks=2, bf16=False)
REPLICATED = Layout(ranks=2, distributed_optimizer=False)
SAVED = [ONE_RANK, TWO_REPLICAS, TENSOR_PARALLEL, BUCKETS, GATHERED, FULL_PRECISION, REPLICATED]
#: Who saved, and who loads.
READ_BY_STOCK = [
    (ONE_RANK, ONE_RANK),
    (ONE_RANK, TWO_REPLICAS),
    (ONE_RANK, TENSOR_PARALLEL),
    (TWO_REPLICAS, ONE_RANK),
    (TWO_REPLICAS, TENSOR_PARALLEL),
    (TENSOR_PARALLEL, ONE_RANK),
    (TENSOR_PARALLEL, TWO_REPLICAS),
    (BUCKETS, Layout(sharding=BUCKET_SPACE)),
    (BUCKETS, BUCKETS),
    (GATHERED, Layout(sharding=GATHERED.sharding)),
    (FULL_PRECISION, Layout(bf16=False)),
    (REPLICATED, Layout(distributed_optimizer=False)),
]


class Ranks:
    """The pool, and the checkpoints that its ranks wrote."""

    def __init__(self, pool: RankPool, root: Path) -> None:
        self._pool = pool
        self.root = root
        self._saved: dict[Layout, list[list[Part]]] = {}

    def run(self, fn: Any, layout: Layout, *args: object) -> list[Any]:
        return run(self._pool, fn, layout, *args)

    def name(self, layout: Layout) -> str:
        return f"megatron-{os.getpid()}-{layout}"

    def directory(self, layout: Layout) -> Path:
        return self.root / str(layout)

    def saved(self, layout: Layout) -> list[list[Part]]:
        """What each rank saved into `directory(layout)`; it came back from memory already."""
        if layout not in self._saved:
            place = self.directory(layout), self.name(layout)
            self._saved[layout] = self.run(megatron_ranks.saved, layout, *place)
        return self._saved[layout]


@pytest.fixture(scope="module")
def ranks(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    yield Ranks(pool, tmp_path_factory.mktemp("megatron"))
    assert list(DEFAULT_ROOT.glob(f"resiliency-megatron-{os.getpid()}-*")) == []


@pytest.mark.parametrize("layout", SAVED, ids=str)
def test_a_state_comes_back_from_memory_and_from_disk_with_the_same_bits(
    ranks: Ranks, layout: Layout
) -> None:
    expected = ranks.saved(layout)  # from memory: within
    ranks.run(megatron_ranks.restored_from_disk, layout, ranks.directory(layout), expected)


def test_a_new_start_takes_the_newest_checkpoint_on_all_ranks(ranks: Ranks) -> None:
    expected = ranks.saved(TWO_REPLICAS)
    place = ranks.directory(TWO_REPLICAS), ranks.name(TWO_REPLICAS)
    ranks.run(megatron_ranks.restored_together, TWO_REPLICAS, *place, expected)


@dataclass
class Stock:
    """What stock Megatron did, all in one start."""

    #: (who saved, who loads) -> what each rank loaded.
    read: dict[tuple[Layout, Layout], list[dict[str, Any]]]
    #: Where it saved a state of two replicas, and what each rank had in it.
    directory: Path
    saved: list[list[Part]]
    #: What one rank loaded from there.
    read_back: dict[str, Any]


@pytest.fixture(scope="module")
def stock(ranks: Ranks) -> Stock:
    directory, state = ranks.root / "by-stock", str(ranks.root / "state-{rank}")
    checkpoint = directory / f"step={STEP}"
    checkpoint.mkdir(parents=True)
    saved = ranks.run(megatron_ranks.trained_state, TWO_REPLICAS, state)
    own = str(ranks.root / "own-template-{rank}"), str(ranks.root / "own-result-{rank}")
    ranks.run(megatron_ranks.template, ONE_RANK, own[0], TWO_REPLICAS.ranks)
    jobs, results = [], []
    for world_size, first in ((2, (str(checkpoint), state, "")), (1, (str(checkpoint), *own))):
        cases = [first]
        pairs = [pair for pair in READ_BY_STOCK if pair[1].ranks == world_size]
        for number, (saver, loader) in enumerate(pairs):
            ranks.saved(saver)
            file = str(ranks.root / f"{world_size}-{number}-{{kind}}-{{{{rank}}}}")
            template, result = file.format(kind="template"), file.format(kind="result")
            ranks.run(megatron_ranks.template, loader, template, saver.ranks)
            cases.append((str(ranks.directory(saver) / f"step={STEP}"), template, result))
            results.append(((saver, loader), [result.format(rank=rank) for rank in range(world_size)]))
        jobs.append((world_size, cases))
    run_stock(ranks.root, jobs)
    read = {pair: [torch.load(file, weights_only=False) for file in files] for pair, files in results}
    return Stock(read, directory, saved, torch.load(own[1].format(rank=0), weights_only=False))


def run_stock(root: Path, jobs: list[tuple[int, list[tuple[str, str, str]]]]) -> None:
    """Do all `jobs` in cold processes that know nothing of this project."""
    (root / "jobs").write_text(json.dumps(jobs))
    argv = [sys.executable, "-W", "ignore", str(Path(__file__).parent / "stock_megatron.py"), str(root)]
    with Command(argv, cwd=root, cold=True) as command:
        assert command.wait(timeout=len(jobs) * JOB_S) == 0, command.output


@pytest.mark.thorough("tests/nemo/test_stock_readers.py has one size")
@pytest.mark.parametrize("pair", READ_BY_STOCK, ids=lambda pair: f"{pair[0]}-to-{pair[1]}")
def test_stock_megatron_loads_it_at_any_size_with_the_same_bits(
    ranks: Ranks, stock: Stock, pair: tuple[Layout, Layout]
) -> None:
    saver, loader = pair
    loaded = stock.read[pair]
    assert len(loaded) == loader.ranks
    assert all(each["ours"] == [] for each in loaded)
    parts = [Part(**tensor) for each in loaded for tensor in each["tensors"]]
    expected = [part for parts in ranks.saved(saver) for part in parts]
    assert differing(parts, expected) == []
    assert any("exp_avg" in part.key for part in parts)
    flattened = loader.distributed_optimizer and loader.sharding == MODEL_SPACE
    assert any(part.flattened for part in parts) == flattened
    for rank, each in enumerate(loaded):
        values = each["values"]
        assert values["global_step",] == STEP
        assert values["loops", "epochs", 1] == 2
        assert values["content_metadata", "form"] == saver.sharding
        if saver.ranks == loader.ranks:
            assert values["random", "draws"] == (rank, 0.5)
            assert values["random", "torch"].dtype == torch.uint8


@pytest.mark.thorough("buckets of another layout that are refused are near")
@pytest.mark.parametrize(
    ("saver", "loader"),
    [(TENSOR_PARALLEL, TWO_REPLICAS), (TWO_REPLICAS, ONE_RANK)],
    ids=["other-cut", "fewer-ranks"],
)
def test_another_parallel_layout_is_refused_and_the_same_template_loads_with_stock_megatron(
    ranks: Ranks, saver: Layout, loader: Layout
) -> None:
    expected = [part for parts in ranks.saved(saver) for part in parts]
    place = ranks.directory(saver), ranks.name(loader)
    found = ranks.run(megatron_ranks.loaded_with_another_layout, loader, *place)
    assert differing([part for parts in found for part in parts], expected) == []


@pytest.mark.parametrize(
    ("saver", "loader"),
    [
        (Layout(ranks=2, tensor=2, sharding=BUCKET_SPACE), Layout(sharding=BUCKET_SPACE)),
        (Layout(sharding=BUCKET_SPACE), Layout(ranks=2, tensor=2, sharding=BUCKET_SPACE)),
    ],
    ids=str,
)
def test_buckets_of_another_tensor_parallel_layout_are_refused_on_all_ranks_with_what_to_set(
    ranks: Ranks, saver: Layout, loader: Layout
) -> None:
    ranks.saved(saver)
    for text in ranks.run(megatron_ranks.loaded_by_nemo, loader, ranks.directory(saver)):
        assert f"step={STEP} holds the optimizer in the form dp_reshardable" in text
        assert "Global shape mismatch" in text
        assert "ckpt_optim_fully_reshardable=True" in text


@pytest.mark.parametrize(
    ("saver", "loader"),
    [
        (BUCKETS, Layout(sharding=BUCKET_SPACE)),
        (Layout(ranks=2, tensor=2, sharding=GATHERED.sharding), Layout(sharding=GATHERED.sharding)),
    ],
    ids=str,
)
def test_what_a_form_can_be_cut_anew_for_is_loaded_with_the_same_bits(
    ranks: Ranks, saver: Layout, loader: Layout
) -> None:
    expected = [part for parts in ranks.saved(saver) for part in parts]
    found = ranks.run(megatron_ranks.loaded_by_nemo, loader, ranks.directory(saver))
    assert differing([part for parts in found for part in parts], expected) == []


def test_one_rank_that_wants_another_state_makes_all_refuse_and_nothing_changes(ranks: Ranks) -> None:
    ranks.saved(TWO_REPLICAS)
    place = ranks.directory(TWO_REPLICAS), ranks.name(TWO_REPLICAS)
    first, second = ranks.run(megatron_ranks.refused, TWO_REPLICAS, *place)
    names = {"key": ".other", "shape": "other parts of", "object": "another object"}
    for change, name in names.items():
        assert first[change].startswith("rank 1, while restoring")
        assert "the state to restore wants" in second[change]
        assert name in second[change]


def test_a_flipped_bit_is_found_and_the_checkpoint_hidden(ranks: Ranks, tmp_path: Path) -> None:
    expected = ranks.run(megatron_ranks.saved, TENSOR_PARALLEL, tmp_path, ranks.name(TENSOR_PARALLEL))
    some = next(part for part in expected[1] if part.key.startswith("optimizer.state.exp_avg."))
    file = file_in(tmp_path / f"step={STEP}", "__1_0.distcp")
    content = bytearray(file.read_bytes())
    content[content.index(some.data.numpy().tobytes())] ^= 1
    file.write_bytes(content)
    ranks.run(megatron_ranks.found_bad, TENSOR_PARALLEL, tmp_path, ranks.name(TENSOR_PARALLEL))
    assert inspect(LocalStorage(tmp_path), STEP).condition is Condition.UNFINISHED


@pytest.mark.thorough("tests/nemo/test_stock_readers.py loads with stock Megatron")
def test_a_checkpoint_of_stock_megatron_is_passed_over_and_loads_with_stock_megatron(
    ranks: Ranks, stock: Stock
) -> None:
    def content() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in stock.directory.rglob("*") if path.is_file()}

    before = content()
    ranks.run(megatron_ranks.passed_over, TWO_REPLICAS, stock.directory, ranks.name(TWO_REPLICAS))
    assert content() == before
    parts = [Part(**tensor) for tensor in stock.read_back["tensors"]]
    assert differing(parts, [part for parts in stock.saved for part in parts]) == []
