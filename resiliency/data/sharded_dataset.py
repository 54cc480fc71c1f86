# SPDX-License-Identifier: Apache-2.0
"""A dataset of which each rank holds a share in memory.

The files are shuffled once and laid on a ring. A rank's share is a window of the ring, and the windows of all
ranks begin evenly spaced. So a share has no file twice, and over all ranks each file is held equally often,
give or take
one: with ``samples_pct_per_replica`` at ``1 / world_size`` about once, with more of it by several ranks.

On disk: ``root/<class>/**/<file>``, the layout of image folders; classes are numbered in the order of their
names.
"""

from __future__ import annotations

import logging
import math
import os
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from resiliency.data.order import EpochOrder
from resiliency.data.progress import check_rank
from resiliency.errors import ConfigError, DataError

log = logging.getLogger(__name__)

IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
#: Files that are read at a time: enough to hide the latency of network storage.
_THREADS = 16


def pil_loader(path: str) -> Any:
    """An image as an RGB image of Pillow.

    Raises:
        ConfigError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError(
            "the default loader reads images with Pillow, which is not installed.",
            hint="Install pillow, or pass loader=.",
        ) from error
    with Image.open(path) as image:
        return image.convert("RGB")


def _same(value: Any) -> Any:
    return value


class DistributedShardedDataset(Dataset[tuple[Any, Any]]):
    """This rank's share of a folder of files, loaded into memory by threads.

    Args:
        root: has a directory for each class.
        rank, world_size: of this program.
        samples_pct_per_replica: share of the files that each rank holds, above 0 and at most 1; a decimal
            fraction is taken as it is written, so 0.07 of 100 files is 7.
        device_id: stack samples and targets into tensors on this device: a number of a CUDA device, or a
            name.
        seed: of the shuffle; equal on all ranks.
        loader: path to sample.
        extensions: of the files to take, by default those of images; None takes all.
        sample_load_transform, target_load_transform: applied once, when a file is loaded.
        sample_getitem_transform, target_getitem_transform: applied at each access.
        is_valid_file: path to whether it is taken, instead of the default extensions or beside given ones.
    Attributes:
        classes, class_to_idx: names of classes, and their numbers.
        samples, targets: what this rank holds: lists, or tensors with `device_id`.
        paths: of the files that this rank holds, in the order of `samples`.
    Raises:
        ConfigError: there is no such share or rank, no class, or a class without files; samples cannot be
            stacked.
        DataError: a file cannot be loaded; the text names it.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        rank: int,
        world_size: int,
        samples_pct_per_replica: float | Fraction,
        device_id: int | str | torch.device | None = None,
        seed: int = 0,
        shuffle: bool = True,
        loader: Callable[[str], Any] = pil_loader,
        extensions: Sequence[str] | None = IMAGE_EXTENSIONS,
        sample_load_transform: Callable[[Any], Any] = _same,
        target_load_transform: Callable[[Any], Any] = _same,
        sample_getitem_transform: Callable[[Any], Any] | None = None,
        target_getitem_transform: Callable[[Any], Any] | None = None,
        is_valid_file: Callable[[str], bool] | None = None,
    ) -> None:
        if is_valid_file is not None and extensions is IMAGE_EXTENSIONS:
            extensions = None  # the default is for those who say nothing about files
        self.root = os.fspath(root)
        self.classes = _classes(self.root)
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}
        self._files = _files(self.root, self.classes, extensions, is_valid_file)
        self._share = _share(samples_pct_per_replica, len(self._files))
        self._order = EpochOrder(len(self._files), seed=seed, shuffle=shuffle)
        self._loader = loader
        self._load_transforms = sample_load_transform, target_load_transform
        self._getitem_transforms = sample_getitem_transform, target_getitem_transform
        self._device = None if device_id is None else torch.device(device_id)
        self._held: list[int] = []
        self._place = self._home = rank, world_size
        self.samples: Any = []
        self.targets: Any = []
        self.reshard(rank, world_size)

    @property
    def paths(self) -> list[str]:
        return [self._files[number][0] for number in self._held]

    @cached_property
    def _ring_id(self) -> str:
        below = len(os.path.join(self.root, ""))
        names = "\n".join(
            self._files[number][0][below:] for number in self._order.at(torch.arange(len(self._files)))
        )
        return f"{zlib.crc32(names.encode(errors='surrogateescape')):08x}"

    @property
    def share_id(self) -> str:
        """Which share of which files this is; equal on all ranks. A sampler has it in its state, and goes on
        in no other."""
        (rank, world), (home, _) = self._place, self._home
        return (
            f"{self._share} of {len(self._files)} files ({self._ring_id}) on each of {world} ranks, moved by "
            f"{(rank - home) % world}"
        )

    def __len__(self) -> int:
        """Files of this rank; equally many on all ranks."""
        return len(self._held)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        sample, target = self.samples[index], self.targets[index]
        of_sample, of_target = self._getitem_transforms
        return of_sample(sample) if of_sample else sample, of_target(target) if of_target else target

    def reshard(self, rank: int, world_size: int) -> None:
        """Hold the share of another rank or world, loading only the files that are not held.

        A sampler in the middle of an epoch of the old share does not go on in the new one: it refuses.

        Raises:
            ConfigError, DataError: as the constructor; the old share is still held.
        """
        check_rank(rank, world_size)
        if self._share * world_size < len(self._files):
            log.warning(
                "%d ranks with %d files each never see all of %d files",
                world_size,
                self._share,
                len(self._files),
            )
        start = rank * len(self._files) // world_size
        wanted: list[int] = self._order.at(torch.arange(start, start + self._share)).tolist()
        held = {number: place for place, number in enumerate(self._held)}
        missing = [number for number in wanted if number not in held]
        with ThreadPoolExecutor(min(_THREADS, max(1, len(missing)))) as threads:
            loaded = dict(zip(missing, threads.map(self._load, missing), strict=True))
        pairs = [
            (self.samples[held[number]], self.targets[held[number]]) if number in held else loaded[number]
            for number in wanted
        ]
        samples, targets = [sample for sample, _ in pairs], [target for _, target in pairs]
        if self._device is not None:
            self.samples, self.targets = self._stack(samples, wanted), self._stack(targets, wanted)
        else:
            self.samples, self.targets = samples, targets
        self._held = wanted
        self._place = rank, world_size
        if world_size != self._home[1]:
            self._home = self._place

    def _load(self, number: int) -> tuple[Any, Any]:
        path, target = self._files[number]
        of_sample, of_target = self._load_transforms
        try:
            return of_sample(self._loader(path)), of_target(target)
        except ConfigError:
            raise
        except Exception as error:
            raise DataError(
                f"{path} could not be loaded: {type(error).__name__}: {error}.", path=path
            ) from error

    def _stack(self, values: list[Any], numbers: list[int]) -> Tensor:
        tensors = [
            _tensor(value, self._files[number][0]) for value, number in zip(values, numbers, strict=True)
        ]
        for tensor, number in zip(tensors, numbers, strict=True):
            if tensor.shape != tensors[0].shape:
                raise ConfigError(
                    f"samples of two shapes cannot be stacked for device_id: {tuple(tensors[0].shape)} of "
                    f"{self._files[numbers[0]][0]} and {tuple(tensor.shape)} of {self._files[number][0]}.",
                    hint="Give them one shape with sample_load_transform.",
                )
        if len({tensor.device for tensor in tensors}) > 1:  # some were held, and some are just loaded
            tensors = [tensor.to(self._device) for tensor in tensors]
        return torch.stack(tensors).to(self._device)


def _tensor(value: Any, path: str) -> Tensor:
    """A sample or target as a tensor; an image as uint8 (channels, height, width)."""
    if isinstance(value, Tensor):
        return value
    if hasattr(value, "getbands"):  # an image of Pillow
        data = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8)
        return data.view(value.height, value.width, len(value.getbands())).permute(2, 0, 1)
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"a {type(value).__name__} of {path} cannot be moved to a device.",
            hint="Make it a tensor with sample_load_transform or target_load_transform.",
        ) from error


def _share(part: float | Fraction, files: int) -> int:
    # By the decimal that was written: in floating point 0.07 * 100 is above 7.
    exact = part if isinstance(part, Fraction) else Fraction(repr(float(part)))
    if not 0 < exact <= 1:
        raise ConfigError(f"samples_pct_per_replica is {part}; it is above 0 and at most 1.")
    return math.ceil(exact * files)


def _classes(root: str) -> list[str]:
    try:
        names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    except OSError as error:
        raise ConfigError(f"{root} cannot be listed: {error.strerror}.") from error
    if not names:
        raise ConfigError(f"{root} has no directories; it has one for each class.")
    return names


def _files(
    root: str,
    classes: list[str],
    extensions: Sequence[str] | None,
    is_valid_file: Callable[[str], bool] | None,
) -> list[tuple[str, int]]:
    endings = None if extensions is None else tuple(ending.lower() for ending in extensions)
    found: list[tuple[str, int]] = []
    for number, name in enumerate(classes):
        before = len(found)
        for directory, _, names in sorted(os.walk(os.path.join(root, name), followlinks=True)):
            for path in (os.path.join(directory, file) for file in sorted(names)):
                if endings is not None and not path.lower().endswith(endings):
                    continue
                if is_valid_file is None or is_valid_file(path):
                    found.append((path, number))
        if len(found) == before:
            wanted = "that is_valid_file takes" if endings is None else f"that ends in {', '.join(endings)}"
            raise ConfigError(f"the class {name} in {root} has no file {wanted}.")
    return found
