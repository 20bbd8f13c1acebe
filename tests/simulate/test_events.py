"""The discrete-event engine on its own."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktc.simulate.events import Task, run


def task(name: str, lane: str, seconds: float, after: tuple[int, ...] = (), awaits: tuple[int, ...] = ()) -> Task:
    return Task(name, "work", 0, lane, seconds, after, awaits)


def times(tasks: list[Task]) -> list[tuple[float, float]]:
    return [(s.start, s.end) for s in run(tasks)]


def test_a_lane_does_one_thing_at_a_time_in_order_of_readiness() -> None:
    tasks = [
        task("a", "x", 3),
        task("late", "x", 1, after=(2,)),  # earlier in the list, but ready later
        task("b", "y", 1),
        task("early", "x", 1),
    ]
    assert times(tasks) == [(0, 3), (4, 5), (0, 1), (3, 4)]


def test_awaiting_holds_the_lane() -> None:
    """A sync blocks its stream until the awaited work has ended; its own time comes after that."""
    tasks = [task("work", "cpu", 5), task("sync", "host", 1, awaits=(0,)), task("next", "host", 1)]
    assert times(tasks) == [(0, 5), (0, 6), (6, 7)]
    done_before = [task("work", "cpu", 1), task("other", "host", 4), task("sync", "host", 1, after=(1,), awaits=(0,))]
    assert times(done_before)[2] == (4, 5)


def test_two_awaited_at_the_same_moment_end_it_once() -> None:
    tasks = [task("a", "x", 2), task("b", "y", 2), task("sync", "host", 1, awaits=(0, 1)), task("c", "host", 1)]
    assert times(tasks)[2:] == [(0, 3), (3, 4)]


def test_work_that_takes_no_time() -> None:
    tasks = [task("a", "x", 0), task("b", "x", 0, after=(0,)), task("c", "y", 1, after=(1,), awaits=(0,))]
    assert times(tasks) == [(0, 0), (0, 0), (0, 1)]


@pytest.mark.parametrize(
    "tasks",
    [
        [task("a", "x", 1, after=(1,)), task("b", "y", 1, after=(0,))],
        [task("sync", "x", 1, awaits=(1,)), task("behind it", "x", 1)],  # the lane is held for ever
    ],
)
def test_a_circle_is_an_error_and_not_a_hang(tasks: list[Task]) -> None:
    with pytest.raises(ValueError, match="wait for each other"):
        run(tasks)


@st.composite
def graphs(draw: st.DrawFn) -> list[Task]:
    tasks: list[Task] = []
    for i in range(draw(st.integers(1, 14))):
        after = draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else set()
        lane, seconds = draw(st.sampled_from("xyz")), draw(st.integers(0, 5))
        tasks.append(task(str(i), lane, seconds, tuple(after)))
    return tasks


@settings(max_examples=100, deadline=None)
@given(graphs())
def test_every_schedule_is_legal_and_never_idles_without_need(tasks: list[Task]) -> None:
    slices = run(tasks)
    by_lane = defaultdict(list)
    for s in slices:
        assert s.end == s.start + s.task.seconds
        assert all(slices[i].end <= s.start for i in s.task.after)
        by_lane[s.task.lane].append(s)
    for own in by_lane.values():
        own.sort(key=lambda s: (s.start, s.end))
        assert all(a.end <= b.start for a, b in pairwise(own))
        for s in own:  # a task starts when it is ready or when another of its lane ends
            ready = max((slices[i].end for i in s.task.after), default=0)
            assert s.start == ready or any(o.end == s.start for o in own if o is not s)
