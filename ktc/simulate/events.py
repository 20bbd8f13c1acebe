"""The discrete-event engine: tasks on lanes, each lane one task at a time, first come first served.

Knows nothing about models: what the tasks are and what they wait for is in schedule.py.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Task:
    """One piece of work.

    Attributes:
        name, kind, layer: for reports (`kind` is submit, immediate, deferred, attention, shared, ...).
        lane: the resource that it occupies from start to end.
        seconds: its own time.
        after: indices of tasks that must have ended before it may start.
        awaits: indices of tasks that it waits for *while it holds its lane*; its own time follows them.
        start: seconds of its own more if the lane stood idle before it.
    """

    name: str
    kind: str
    layer: int
    lane: str
    seconds: float
    after: tuple[int, ...] = ()
    awaits: tuple[int, ...] = ()
    start: float = 0.0


@dataclass(frozen=True)
class Slice:
    """When a task ran: [start, end) in seconds; `seconds` of it were its own work, the rest waiting."""

    task: Task
    start: float
    end: float


def run(tasks: Sequence[Task]) -> list[Slice]:
    """Run all tasks.

    A lane takes the waiting task that became ready first; of equals, the one that is earlier in `tasks`.

    Returns:
        One slice per task, in the order of `tasks`; a task that found its lane idle has its `start` in its seconds.
    Raises:
        ValueError: tasks wait for each other in a circle (or for one that does not exist).
    """
    count = len(tasks)
    followers: list[list[int]] = [[] for _ in range(count)]
    awaited_by: list[list[int]] = [[] for _ in range(count)]
    missing = [len(set(t.after)) for t in tasks]
    for index, task in enumerate(tasks):
        for other in set(task.after):
            followers[other].append(index)
        for other in set(task.awaits):
            awaited_by[other].append(index)
    start: list[float | None] = [None] * count
    end: list[float | None] = [None] * count
    waiting: dict[str, list[tuple[float, int]]] = {task.lane: [] for task in tasks}
    holder: dict[str, int | None] = dict.fromkeys(waiting)
    free_since = dict.fromkeys(waiting, -1.0)
    own = [task.seconds for task in tasks]
    events: list[tuple[float, int]] = []  # (time, task that ends then)

    def finish_when_known(index: int) -> None:
        """Schedule the end of a running task once everything it awaits has ended."""
        begun = start[index]
        ends = [end[other] for other in tasks[index].awaits]
        if begun is not None and all(e is not None for e in ends):
            latest = max([begun, *(e for e in ends if e is not None)])
            heapq.heappush(events, (latest + own[index], index))

    def serve(lane: str, now: float) -> None:
        if holder[lane] is None and waiting[lane]:
            _, index = heapq.heappop(waiting[lane])
            holder[lane] = index
            start[index] = now
            if free_since[lane] < now:
                own[index] += tasks[index].start
            finish_when_known(index)

    for index, task in enumerate(tasks):
        if missing[index] == 0:
            heapq.heappush(waiting[task.lane], (0.0, index))
    for lane in waiting:
        serve(lane, 0.0)
    while events:
        now = events[0][0]
        ended = []
        while events and events[0][0] == now:  # all that end now, before any lane chooses
            ended.append(heapq.heappop(events)[1])
        touched = []
        for index in ended:
            end[index] = now
            holder[tasks[index].lane] = None
            free_since[tasks[index].lane] = now
            touched.append(tasks[index].lane)
            for other in followers[index]:
                missing[other] -= 1
                if missing[other] == 0:
                    heapq.heappush(waiting[tasks[other].lane], (now, other))
                    touched.append(tasks[other].lane)
        for other in {o for index in ended for o in awaited_by[index]}:
            finish_when_known(other)
        for lane in sorted(set(touched)):
            serve(lane, now)
    slices = []
    for task, seconds, begun, done in zip(tasks, own, start, end, strict=True):
        if begun is None or done is None:
            raise ValueError(f"{task.name} never ran: tasks wait for each other")
        slices.append(Slice(task if seconds == task.seconds else replace(task, seconds=seconds), begun, done))
    return slices
