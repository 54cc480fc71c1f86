# SPDX-License-Identifier: Apache-2.0
"""Model sizes are what their names say, and a layout that cannot run is refused with one that can."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from resiliency.errors import ConfigError
from resiliency.model import MODELS, ParallelLayout, check_layout

TINY = MODELS["tiny"]


@pytest.mark.parametrize(
    ("name", "parameters", "tolerance"),
    # "2B" is the size class of a family, not a count; the others are counts.
    [("36M", 36e6, 0.03), ("2B", 2e9, 0.1), ("8B", 8e9, 0.03), ("70B", 70e9, 0.03), ("405B", 405e9, 0.03)],
)
def test_a_model_has_the_parameters_that_its_name_promises(
    name: str, parameters: float, tolerance: float
) -> None:
    assert MODELS[name].parameters == pytest.approx(parameters, rel=tolerance)


def test_the_count_is_the_sum_of_the_tensors_of_a_llama() -> None:
    """Counted by hand for tiny: per layer q, k, v, o; gate, up, down; two norms."""
    layer = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
    assert TINY.parameters == 2 * layer + 64 + 2 * 512 * 64
    assert TINY.checkpoint_bytes() == 16 * TINY.parameters


@pytest.mark.parametrize(("truncated", "whole"), [("70Bt", "70B"), ("405Bt", "405B")])
def test_a_truncated_model_differs_from_its_original_in_depth_and_layout_only(
    truncated: str, whole: str
) -> None:
    short, full = MODELS[truncated], MODELS[whole]
    assert short.layers == 4
    assert replace(short, name=full.name, layers=full.layers, layout=full.layout) == full


def test_models_are_listed_under_their_own_names_smallest_first() -> None:
    assert all(name == size.name for name, size in MODELS.items())
    whole = [size.parameters for name, size in MODELS.items() if not name.endswith("t")]
    assert whole == sorted(whole)


@pytest.mark.parametrize("size", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("replicas", [1, 2, 5])
def test_every_model_runs_in_its_own_layout_on_whole_replicas(size: object, replicas: int) -> None:
    assert isinstance(size, type(TINY))
    world_size = size.layout.ranks_per_replica * replicas
    assert check_layout(size, size.layout, world_size=world_size) == replicas


REFUSED = {
    "too few ranks": (
        {"layout": ParallelLayout(tensor=4), "world_size": 6},
        [
            "model tiny cannot run as tensor 4 x pipeline 1 x context 1 on 6 ranks",
            "needs 4 ranks and 6",
            "Start 4",
        ],
    ),
    "layers": (
        {"layout": ParallelLayout(pipeline=3), "world_size": 3},
        ["2 layers do not divide into 3 pipeline chunks", "divides 2"],
    ),
    "chunks": (
        {"layout": ParallelLayout(pipeline=2, virtual_pipeline=2), "world_size": 2},
        ["2 chunks per stage", "2 layers do not divide into 4 pipeline chunks"],
    ),
    "a virtual pipeline of one stage": (
        {"layout": ParallelLayout(virtual_pipeline=2), "world_size": 1},
        ["a virtual pipeline needs a pipeline of at least 2 stages"],
    ),
    "heads": (
        {"layout": ParallelLayout(tensor=8), "world_size": 8},
        ["4 attention heads do not divide over 8 tensor-parallel ranks", "divides 4"],
    ),
    "query groups": (
        {"size": replace(TINY, query_groups=2), "layout": ParallelLayout(tensor=4), "world_size": 4},
        ["2 query groups do not divide over 4"],
    ),
    "sequence": (
        {"size": replace(TINY, seq_length=66), "layout": ParallelLayout(context=2), "world_size": 2},
        ["sequence length 66 is not a multiple of 2 x 2"],
    ),
    "optimizer replicas": (
        {"layout": ParallelLayout(), "world_size": 3, "optimizer_replicas": 2},
        ["3 data-parallel replicas do not divide into 2 optimizer replicas", "--num-optimizer-replicas"],
    ),
    "batch": (
        {"layout": ParallelLayout(), "world_size": 4, "global_batch_size": 12, "micro_batch_size": 2},
        ["global batch size 12 is not a multiple of 4 replicas x 2 samples", "multiple of 8"],
    ),
    "no batch": (
        {"layout": ParallelLayout(), "world_size": 1, "global_batch_size": 0},
        ["global batch size 0"],
    ),
    "too few microbatches to interleave": (
        {
            "size": replace(TINY, layers=4),
            "layout": ParallelLayout(pipeline=2, virtual_pipeline=2),
            "world_size": 4,
            "global_batch_size": 6,
        },
        ["3 microbatches per replica do not divide over 2 stages that interleave", "multiple of 4"],
    ),
}


@pytest.mark.parametrize(("arguments", "told"), REFUSED.values(), ids=REFUSED)
def test_a_layout_that_cannot_run_is_refused_with_the_numbers(
    arguments: dict[str, object], told: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_layout(**{"size": TINY} | arguments)  # type: ignore[arg-type]
    for expected in told:
        assert expected in str(caught.value)
    assert caught.value.fields["world_size"] == arguments["world_size"]


def test_a_batch_that_fills_the_interleaved_pipeline_is_accepted() -> None:
    layout = ParallelLayout(pipeline=2, virtual_pipeline=2)
    assert check_layout(replace(TINY, layers=4), layout, world_size=4, global_batch_size=8) == 2


def test_sizes_and_layouts_need_neither_torch_nor_nemo() -> None:
    code = (
        "import sys; from resiliency.model import MODELS, check_layout;"
        "[check_layout(s, s.layout, world_size=s.layout.ranks_per_replica) for s in MODELS.values()];"
        "print([m for m in ('torch', 'nemo', 'megatron', 'lightning', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
