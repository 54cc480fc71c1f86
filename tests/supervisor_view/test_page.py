# SPDX-License-Identifier: Apache-2.0
"""The status page: well-formed, self-contained, escaped, and readable with 1,000 hosts."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from supervisor.view.page import CONTENT_SECURITY_POLICY, status_page
from supervisor.view.status import Status

from .documents import EVIL, full, large

_VOID = {"meta"}


class _Reader(HTMLParser):
    """Text and elements; fails where elements are not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.script = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "script" in self.open:
            self.script += data
        elif "style" not in self.open:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def read(status: Status) -> _Reader:
    reader = _Reader()
    reader.feed(status_page(status))
    reader.close()
    assert reader.open == []
    return reader


@pytest.mark.parametrize(
    "words",
    [
        "Frozen by alice",
        "Shadow mode",
        "No space left on device",
        "No contact with the actuator since 1 min 04 s: Connection refused",
        "incident-7",
        "host_hb on host-1.boot",
        "stream: no report for 31 s",
        "Xid 79, GPU-3",
        "gathered: 2.0 s",
        "hot_swap: since 1 min 33 s",
        "2 of 3 in place, 5 of 7 whole",
        "1 of 2, next in 30 s; 1 without progress",
        "120, 1 min 15 s ago; best 130",
        "spare host-2.boot",
        "done after 1.5 s the node is unschedulable",
        "GPU fell off the bus",
        "hot swap of host-1.boot: it is lost",
        "1 closed incident",
        "2 hosts to look at",
        "2 of 3 cordons left",
    ],
)
def test_the_page_says(words: str) -> None:
    assert words in read(full()).text


def test_a_fleet_without_anything_has_a_page_too() -> None:
    text = read(Status(epoch=1, uptime_s=0.0)).text
    assert "Open incidents None." in text
    assert "0 hosts" in text


def test_nothing_from_a_host_becomes_markup() -> None:
    evil = replace(full(), frozen_by=EVIL, release=EVIL)
    scripts = [tag for tag, _ in read(evil).elements if tag == "script"]
    assert len(scripts) == 1
    assert EVIL in "".join(read(evil).texts)


def test_the_page_needs_nothing_else_and_may_run_nothing_else() -> None:
    reader = read(full())
    loads = {"src", "href", "action", "data", "srcset"}
    assert [(tag, attrs) for tag, attrs in reader.elements if loads & attrs.keys()] == []
    assert not any(name.startswith("on") for _, attrs in reader.elements for name in attrs)
    assert re.findall(r"https?://|url\(|@import", status_page(full())) == []
    digest = base64.b64encode(hashlib.sha256(reader.script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in CONTENT_SECURITY_POLICY


def test_a_large_fleet_is_a_map_with_what_needs_a_look_listed() -> None:
    page, reader = status_page(large(1000)), read(large(1000))
    squares = [attrs for tag, attrs in reader.elements if tag == "i"]
    assert len(squares) == 1000
    assert "llama: 2 failed, 998 running" in reader.text
    assert "2 hosts to look at" in reader.text
    assert reader.text.count("host-3.boot") == 1
    assert "host-4.boot" not in reader.text  # well: only in its square's title
    assert len(page) < 500_000


#: The parts of a browser that the script uses: the second fetch fails.
_BROWSER = """
const shown = [], opened = {}, classes = new Set(), texts = {};
let next, fetched = 0;
globalThis.setTimeout = again => { next = again; };
globalThis.location = {pathname: "/"};
globalThis.document = {
  querySelectorAll: () => [{id: "closed"}],
  querySelector: () => ({replaceWith: node => shown.push(node)}),
  getElementById: id => ({
    setAttribute: name => { opened[id] = name; },
    set textContent(text) { texts[id] = text; },
  }),
  body: {classList: {add: name => classes.add(name), remove: name => classes.delete(name)}},
};
globalThis.DOMParser = class { parseFromString(text) { return {querySelector: () => text}; } };
globalThis.fetch = async () => {
  fetched += 1;
  if (fetched === 2) throw new Error("connection refused");
  return {ok: true, text: async () => `page ${fetched}`};
};
const seen = [];
"""
_ROUNDS = """
for (let round = 0; round < 3; round += 1) {
  await next();
  seen.push([shown.length, [...classes]]);
}
console.log(JSON.stringify({seen, shown, opened, texts}));
"""


def test_the_script_replaces_the_page_keeps_what_is_open_and_says_when_it_is_old() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node to run the page's script")
    program = _BROWSER + read(full()).script + _ROUNDS
    command = [node, "--input-type=module", "-"]
    done = subprocess.run(command, input=program, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "seen": [[1, []], [1, ["stale"]], [2, []]],
        "shown": ["page 1", "page 3"],
        "opened": {"closed": "open"},
        "texts": {"age": 0},
    }


def test_a_state_is_never_told_by_its_colour_alone() -> None:
    reader = read(full())
    titles = [str(attrs["title"]) for tag, attrs in reader.elements if tag == "i"]
    assert [title.splitlines()[1].split(",")[0] for title in titles] == [
        "running",
        "failed",
        "complete",
        "spare",
    ]
