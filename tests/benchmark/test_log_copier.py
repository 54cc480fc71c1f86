# SPDX-License-Identifier: Apache-2.0
"""Logs reach remote storage, and remote storage that fails does not reach training."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from log_copier import LogCopier


def test_closing_copies_every_file_with_its_directory(tmp_path: Path) -> None:
    source, target = tmp_path / "near", tmp_path / "far" / "job"
    with LogCopier(source, target, interval_s=3600):
        (source / "deep").mkdir(parents=True)
        (source / "a.log").write_text("a")
        (source / "deep" / "b.log").write_text("b")
    assert (target / "a.log").read_text() == "a"
    assert (target / "deep" / "b.log").read_text() == "b"


def test_a_file_that_grew_is_copied_again_and_one_that_did_not_is_left_alone(tmp_path: Path) -> None:
    source, target = tmp_path / "near", tmp_path / "far"
    source.mkdir()
    copier = LogCopier(source, target, interval_s=3600)
    (source / "same.log").write_text("same")
    (source / "grows.log").write_text("one")
    copier._copy()
    (target / "same.log").write_text("changed there")
    (source / "grows.log").write_text("one two")
    copier.close()
    assert (target / "grows.log").read_text() == "one two"
    assert (target / "same.log").read_text() == "changed there"


def test_a_target_that_cannot_be_written_costs_a_warning_and_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = tmp_path / "near", tmp_path / "far"
    source.mkdir()
    target.write_text("a file where the directory should be")
    with caplog.at_level(logging.WARNING), LogCopier(source, target, interval_s=3600) as copier:
        (source / "a.log").write_text("a")
        copier._copy()
        assert str(target) in caplog.text
        target.unlink()
    assert (target / "a.log").read_text() == "a"


def test_closing_twice_is_harmless(tmp_path: Path) -> None:
    copier = LogCopier(tmp_path / "none", tmp_path / "far", interval_s=3600)
    copier.close()
    copier.close()
