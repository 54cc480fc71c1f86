# SPDX-License-Identifier: Apache-2.0
"""The sharded dataset: distinct files in each share, even coverage, and every argument means what it says."""

from __future__ import annotations

import logging
import math
import random
import threading
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from resiliency.data import DistributedShardedDataset, InterruptableSampler
from resiliency.errors import ConfigError, DataError


def folder(root: Path, files: int, ending: str = ".txt") -> str:
    """Files 0 to n-1 in two classes, each with its number as text."""
    for number in range(files):
        directory = root / ("odd" if number % 2 else "even") / f"part{number % 3}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{number:04d}{ending}").write_text(str(number))
    return str(root)


def read(path: str) -> int:
    return int(Path(path).read_text())


def shares(root: str, world: int, part: Any, **options: Any) -> list[DistributedShardedDataset]:
    options = {"loader": read, "extensions": None, **options}
    return [DistributedShardedDataset(root, rank, world, part, **options) for rank in range(world)]


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    return {files: folder(tmp_path_factory.mktemp(f"files{files}"), files) for files in (2, 5, 8, 13)}


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    files=st.sampled_from([2, 5, 8, 13]),
    world=st.integers(1, 5),
    part=st.fractions(min_value=Fraction(1, 20), max_value=1, max_denominator=20),
    seed=st.integers(0, 3),
)
def test_each_share_has_distinct_files_and_all_are_held_equally_often_give_or_take_one_c13(
    files: int, world: int, part: Fraction, seed: int, roots: dict[int, str]
) -> None:
    held: Counter[int] = Counter(dict.fromkeys(range(files), 0))
    for share in shares(roots[files], world, part, seed=seed):
        assert len(share) == math.ceil(part * files)
        assert len(set(share.samples)) == len(share)
        assert [read(path) for path in share.paths] == share.samples
        assert [share.class_to_idx[("even", "odd")[number % 2]] for number in share.samples] == share.targets
        held.update(share.samples)
    assert max(held.values()) - min(held.values()) <= 1


def test_half_of_eight_files_on_four_ranks_are_four_different_ones_c13(roots: dict[int, str]) -> None:
    found = shares(roots[8], 4, 0.5, shuffle=False)
    # Even ones first: the order of classes, and of directories in them.
    assert [len(set(share.samples)) for share in found] == [4] * 4
    assert Counter(number for share in found for number in share.samples) == Counter([*range(8)] * 2)


def test_a_share_is_the_decimal_that_was_written_c14(tmp_path: Path) -> None:
    root = folder(tmp_path, 100)
    (share,) = shares(root, 1, 0.07)
    assert len(share) == 7


def test_a_share_is_loaded_by_threads_side_by_side_c19(roots: dict[int, str]) -> None:
    together = threading.Barrier(8)

    def read_with_all_others(path: str) -> int:
        together.wait(60)
        return read(path)

    (share,) = shares(roots[8], 1, 1.0, loader=read_with_all_others)
    assert sorted(share.samples) == list(range(8))


def test_a_rank_that_reshards_at_each_epoch_sees_all_files_c19(roots: dict[int, str]) -> None:
    (dataset, *_) = shares(roots[13], 4, 0.25)
    sampler = InterruptableSampler(dataset)
    seen: set[int] = set()
    for epoch in range(4):
        dataset.reshard(epoch % 4, 4)
        sampler.set_epoch(epoch)
        for index in sampler:
            seen.add(dataset[index][0])
            sampler.advance()
    assert seen == set(range(13))


def test_files_that_no_rank_holds_are_told(roots: dict[int, str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    shares(roots[8], 2, 0.25)
    assert "2 ranks with 2 files each never see all of 8 files" in caplog.text


def test_images_and_classes_become_tensors_on_a_device_by_default_c15(tmp_path: Path) -> None:
    for name, colour in (("cat", (250, 0, 0)), ("dog", (0, 0, 250))):
        (tmp_path / name).mkdir()
        Image.new("RGB", (5, 3), colour).save(tmp_path / name / "0.png")
        (tmp_path / name / "notes.txt").write_text("no image")
    dataset = DistributedShardedDataset(tmp_path, 0, 1, 1.0, device_id="cpu", shuffle=False)
    assert dataset.samples.shape == (2, 3, 3, 5)
    assert dataset.samples.dtype is torch.uint8
    assert dataset.samples[1, :, 0, 0].tolist() == [0, 0, 250]
    assert dataset.targets.tolist() == [0, 1]
    assert dataset.classes == ["cat", "dog"]
    Image.new("RGB", (4, 3)).save(tmp_path / "dog" / "1.png")
    with pytest.raises(ConfigError, match=r"two shapes cannot be stacked.*\(3, 3, 5\) of .*\(3, 3, 4\) of"):
        DistributedShardedDataset(tmp_path, 0, 1, 1.0, device_id="cpu", shuffle=False)


def test_is_valid_file_works_with_the_default_extensions_and_beside_given_ones_c16(tmp_path: Path) -> None:
    root = folder(tmp_path, 6)
    folder(tmp_path, 6, ".dat")
    whole = DistributedShardedDataset(
        root, 0, 1, 1.0, loader=read, is_valid_file=lambda path: not path.endswith("0004.txt")
    )
    assert Counter(whole.samples) == Counter([0, 1, 2, 3, 5, *range(6)])
    both = DistributedShardedDataset(
        root, 0, 1, 1.0, loader=read, extensions=(".DAT",), is_valid_file=lambda path: "0004" not in path
    )
    assert sorted(both.samples) == [0, 1, 2, 3, 5]


def test_global_random_generators_are_left_alone_c17(roots: dict[int, str]) -> None:
    before = random.getstate(), torch.get_rng_state()
    shares(roots[8], 2, 0.5, seed=3)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


@pytest.mark.parametrize("part", [0, -0.5, 1.5])
def test_a_share_of_nothing_or_too_much_is_refused_on_every_rank_c18(
    part: float, roots: dict[int, str]
) -> None:
    for rank in range(2):
        with pytest.raises(ConfigError, match="above 0 and at most 1"):
            DistributedShardedDataset(roots[8], rank, 2, part, loader=read, extensions=None)


def test_another_world_loads_only_what_is_missing_c19(roots: dict[int, str]) -> None:
    loaded: list[str] = []

    def reading(path: str) -> int:
        loaded.append(path)
        return read(path)

    (dataset, _) = shares(roots[8], 2, 0.5, loader=reading)
    assert isinstance(dataset, Dataset)
    held, loaded[:] = set(dataset.paths), []
    dataset.reshard(1, 4)
    assert set(loaded) == set(dataset.paths) - held
    assert 0 < len(loaded) < 4
    (fresh,) = shares(roots[8], 4, 0.5)[1:2]
    assert dataset.samples == fresh.samples


def test_what_a_device_holds_and_what_is_just_loaded_are_stacked_there(roots: dict[int, str]) -> None:
    # As on CUDA, tensors of this device and of the CPU cannot be stacked together.
    (dataset, _) = shares(roots[8], 2, 0.5, device_id="meta")
    held = set(dataset.paths)
    dataset.reshard(1, 4)
    assert set(dataset.paths) & held
    assert set(dataset.paths) - held
    for tensor in (dataset.samples, dataset.targets):
        assert tensor.device == torch.device("meta")
        assert tensor.shape == (4,)


def test_transforms_run_once_at_the_load_and_again_at_each_access(roots: dict[int, str]) -> None:
    (dataset,) = shares(
        roots[5],
        1,
        1.0,
        sample_load_transform=lambda number: [number],
        target_load_transform=str,
        sample_getitem_transform=lambda sample: [*sample, "seen"],
        target_getitem_transform=lambda target: f"class {target}",
    )
    sample, target = dataset[0]
    assert sample == [*dataset.samples[0], "seen"]
    assert target == f"class {dataset.targets[0]}"
    assert len(dataset.samples[0]) == 1


def test_a_file_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    root = folder(tmp_path, 4)
    bad = tmp_path / "even" / "part2" / "0002.txt"
    bad.write_text("no number")
    with pytest.raises(DataError, match=r"even/part2/0002.txt could not be loaded: ValueError"):
        shares(root, 1, 1.0)


def test_folders_without_classes_or_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be listed: No such file"):
        shares(str(tmp_path / "missing"), 1, 1.0)
    with pytest.raises(ConfigError, match="has no directories"):
        shares(str(tmp_path), 1, 1.0)
    (tmp_path / "cat").mkdir()
    with pytest.raises(ConfigError, match=r"the class cat in .* has no file that ends in .jpg, .jpeg"):
        DistributedShardedDataset(tmp_path, 0, 1, 1.0)


def test_the_plain_sampler_resumes_in_a_share(roots: dict[int, str]) -> None:
    (dataset, _) = shares(roots[8], 2, 0.5)
    sampler = InterruptableSampler(dataset)
    everything = [dataset[index][0] for index in sampler]
    sampler.advance(3)
    resumed = InterruptableSampler(dataset)
    resumed.load_state_dict(sampler.state_dict())
    assert [dataset[index][0] for index in resumed] == everything[3:]


@pytest.mark.parametrize(
    ("world", "seed", "moved", "found"),
    [
        (2, 0, 0, "on each of 2 ranks, moved by 0"),
        (4, 9, 0, "on each of 4 ranks, moved by 0"),
        (4, 0, 1, "on each of 4 ranks, moved by 1"),
    ],
)
def test_a_position_in_another_share_is_refused_with_both_sides_d5(
    world: int, seed: int, moved: int, found: str, roots: dict[int, str]
) -> None:
    first = InterruptableSampler(shares(roots[8], 4, 0.5)[0])
    list(first)
    first.advance(2)
    dataset = shares(roots[8], world, 0.5, seed=seed)[0]
    dataset.reshard(moved, world)
    sampler = InterruptableSampler(dataset)
    sampler.load_state_dict(first.state_dict())
    with pytest.raises(ConfigError, match=rf"'4 of 8 files .* moved by 0', and the dataset holds .*{found}"):
        list(sampler)
    sampler.finish_epoch()
    sampler.set_epoch(1)
    assert len(list(sampler)) == 4


def test_shares_that_move_with_the_epoch_resume_from_the_state_of_any_rank(roots: dict[int, str]) -> None:
    datasets = shares(roots[8], 4, 0.5)
    samplers = [InterruptableSampler(dataset) for dataset in datasets]
    states, wanted = [], []
    for epoch in range(3):
        for rank, (dataset, sampler) in enumerate(zip(datasets, samplers, strict=True)):
            dataset.reshard((rank + epoch) % 4, 4)
            sampler.set_epoch(epoch)
            order = [dataset[index][0] for index in sampler]
            sampler.advance(3 if epoch == 2 else 4)
            if epoch == 2:
                states.append(sampler.state_dict())
                wanted.append(order[3:])
    assert all(state == states[0] for state in states)
    resumed = shares(roots[8], 4, 0.5)
    for rank, dataset in enumerate(resumed):
        sampler = InterruptableSampler(dataset)
        sampler.load_state_dict(states[(rank + 1) % 4])
        dataset.reshard((rank + sampler.epoch) % 4, 4)
        assert [dataset[index][0] for index in sampler] == wanted[rank]
    old = states[0].copy()
    del old["share"]  # of a release that did not say it
    sampler.load_state_dict(old)
    with pytest.raises(ConfigError, match="another share of the data: 'none'"):
        list(sampler)


@pytest.mark.parametrize("persists", [False, True])
def test_persistent_workers_do_not_go_on_with_a_share_that_was_changed(
    persists: bool, roots: dict[int, str]
) -> None:
    dataset = shares(roots[8], 2, 0.5)[0]
    sampler = InterruptableSampler(dataset)
    loader = DataLoader(dataset, sampler=sampler, num_workers=1, persistent_workers=persists)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert sorted(sample.item() for sample, _ in loader) == sorted(dataset.samples)
        sampler.advance(4)
    dataset.reshard(1, 2)
    sampler.set_epoch(2)
    if persists:
        with pytest.raises(ConfigError, match="workers of the loader persist and hold a copy of the dataset"):
            next(iter(loader))
        loader = DataLoader(dataset, sampler=sampler)
    assert sorted(sample.item() for sample, _ in loader) == sorted(dataset.samples)
