# SPDX-License-Identifier: Apache-2.0
"""One handler, two formats, and every line says whose it is."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from resiliency import log
from resiliency.errors import ConfigError
from resiliency.runtime import RunInfo

INFO = RunInfo(job_name="j", host="h", rank=3, attempt=1)
logger = logging.getLogger("resiliency.somewhere")


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("resiliency")
    handlers, levels = list(root.handlers), (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
    log.set_step(None)


def configured(**options: str) -> io.StringIO:
    stream = io.StringIO()
    env = {f"RESILIENCY_LOG_{name.upper()}": value for name, value in options.items()}
    log.configure(INFO, env=env, stream=stream)
    return stream


def test_a_text_line_says_when_who_and_where() -> None:
    stream = configured()
    log.set_step(40)
    logger.info("saved %d shards", 4)
    time, rest = stream.getvalue().split(maxsplit=1)
    assert len(time) == len("11:03:52.120")
    assert rest == "INFO    h rank 3 attempt 1 step 40 resiliency.somewhere: saved 4 shards\n"


def test_a_json_line_is_one_object_even_with_a_traceback() -> None:
    stream = configured(format="JSON")
    try:
        raise ValueError("first line\nsecond line")
    except ValueError:
        logger.exception("it broke")
    (line,) = stream.getvalue().splitlines()
    record = json.loads(line)
    assert (record["severity"], record["message"], record["job"]) == ("ERROR", "it broke", "j")
    assert (record["rank"], record["attempt"], "step" in record) == (3, 1, False)
    assert record["exception"].endswith("ValueError: first line\nsecond line")


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_stack_of_a_line_is_kept(form: str) -> None:
    stream = configured(format=form)
    logger.warning("who calls?", stack_info=True)
    assert "test_the_stack_of_a_line_is_kept" in stream.getvalue()


def test_our_level_is_ours_and_other_libraries_stay_at_info() -> None:
    stream = configured(level="debug")
    logger.debug("ours")
    logging.getLogger("chatty").debug("theirs")
    assert "ours" in stream.getvalue()
    assert "theirs" not in stream.getvalue()


def test_a_second_call_replaces_our_handler_and_keeps_those_of_others() -> None:
    other = logging.NullHandler()
    logging.getLogger().addHandler(other)
    first, second = configured(), configured()
    logger.info("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1
    assert other in logging.getLogger().handlers


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"level": "loud"}, "unknown log level 'LOUD'; choose from DEBUG, INFO, WARNING, ERROR, CRITICAL"),
        ({"format": "xml"}, "RESILIENCY_LOG_FORMAT must be text or json, found 'xml'"),
    ],
)
def test_a_wrong_option_is_answered_with_the_allowed_ones(options: dict[str, str], text: str) -> None:
    before = list(logging.getLogger().handlers)
    with pytest.raises(ConfigError, match=text):
        configured(**options)
    assert logging.getLogger().handlers == before


def test_an_argument_wins_over_the_environment() -> None:
    stream = io.StringIO()
    log.configure(INFO, level="error", env={"RESILIENCY_LOG_LEVEL": "DEBUG"}, stream=stream)
    logger.warning("quiet")
    logger.error("loud")
    assert "quiet" not in stream.getvalue()
    assert "loud" in stream.getvalue()
