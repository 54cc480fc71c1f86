# SPDX-License-Identifier: Apache-2.0
"""Strategies for the events of jobs: what a job writes, and what a damaged log may say."""

from __future__ import annotations

from hypothesis import assume
from hypothesis import strategies as st

from resiliency.events import EventType as E
from resiliency.events import RunEvent
from tests.goodput.story import Story, event


@st.composite
def chaos(draw: st.DrawFn) -> list[RunEvent]:
    """Any events at any time: what no job would write, and a damaged log might say."""
    one = st.builds(
        event,
        st.integers(0, 40).map(lambda half: half / 2),
        st.sampled_from(E),
        rank=st.none() | st.integers(0, 2),
        step=st.none() | st.integers(0, 9),
        attempt=st.none() | st.integers(0, 2),
        duration_s=st.none() | st.floats(0, 30) | st.sampled_from([-1.0, float("inf"), float("nan")]),
    )
    events = draw(st.lists(one, min_size=1, max_size=60))
    # What the supervisor and an injector say is not of the job itself: alone, it is no event log of a job.
    assume(any(event.type not in (E.ACTION_DECIDED, E.ACTION_ENDED, E.FAULT_INJECTED) for event in events))
    return events


@st.composite
def damaged_job(draw: st.DrawFn) -> list[RunEvent]:
    """A real job with faults, of which some events are missing and the rest out of order."""
    duration = st.floats(0, 5)
    story = Story(draw(st.integers(1, 4)), step_s=draw(st.floats(0.01, 3)))
    story.start(imports=draw(duration), init=draw(duration))
    for _ in range(draw(st.integers(0, 4))):
        story.steps(draw(st.integers(0, 6)), save_every=draw(st.integers(0, 3)), hold=draw(duration))
        story.fault(
            draw(st.sampled_from(story.ranks)),
            into_step=draw(duration),
            unnoticed=draw(duration),
            injected=draw(st.booleans()),
            stop=draw(duration),
        )
        story.start(restore=draw(st.none() | st.integers(0, story.step)), load=draw(duration))
    story.steps(draw(st.integers(0, 6)))
    if draw(st.booleans()):
        story.finish()
    missing = draw(st.sets(st.integers(0, len(story.events) - 1), max_size=len(story.events) - 1))
    kept = [item for index, item in enumerate(story.events) if index not in missing]
    return draw(st.permutations(kept)) if len(kept) < 40 else kept


@st.composite
def live_job(draw: st.DrawFn) -> list[RunEvent]:
    """A job that fails, in all the ways in which it comes back, with few events missing or late."""
    story = Story(draw(st.integers(1, 3)), per_host=1).start()
    for _ in range(draw(st.integers(1, 3))):
        story.steps(draw(st.integers(0, 4)), save_every=draw(st.integers(0, 2)), hold=draw(st.floats(0, 1)))
        standby = draw(st.booleans())
        if standby:  # created and imported during the life before it
            story.attempt += 1
            story.everyone(E.PROCESS_STARTED)
            story.everyone(E.IMPORTED)
            story.attempt -= 1
            story.steps(draw(st.integers(0, 2)))
        story.fault(draw(st.sampled_from(story.ranks)), injected=draw(st.booleans()))
        if draw(st.booleans()):
            story.tell(E.ACTION_DECIDED, action=draw(st.sampled_from(["hot_swap", "scale_down", "x"])))
        story.now += 1
        if standby:
            story.tell(E.WORKERS_STARTED)
            story.now += 0.5
            story.everyone(E.INITIALIZED)
        else:
            story.start(restore=draw(st.none() | st.integers(0, story.step)))
        if draw(st.booleans()):
            story.tell(E.ACTION_ENDED)
    story.steps(draw(st.integers(0, 3)), save_every=1)
    if draw(st.booleans()):
        story.finish()
    events = story.events
    for place in draw(st.lists(st.integers(0, len(events) - 1), max_size=5)):
        late = events.pop(min(place, len(events) - 1))
        if draw(st.booleans()):
            events.insert(min(place + draw(st.integers(1, 30)), len(events)), late)
    return events
