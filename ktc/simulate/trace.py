"""Timelines as Chrome trace JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

One process per timeline, one thread per lane, and matched begin and end events: every lane does one
thing at a time. Also for timelines that were measured: nothing here knows the simulator.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ktc.errors import DiskError


@dataclass(frozen=True)
class Span:
    """Something that occupied `lane` from `start` to `end` (seconds)."""

    lane: str
    name: str
    category: str
    start: float
    end: float
    args: Mapping[str, Any] = field(default_factory=dict)


def chrome_trace(timelines: Mapping[str, Sequence[Span]], lanes: Iterable[str]) -> dict[str, Any]:
    """The trace document.

    Args:
        timelines: name of a process -> its spans; spans of one lane do not overlap. Empty spans are left out.
        lanes: all lanes, in the order in which they are shown.
    Raises:
        ValueError: two spans of a lane overlap.
    """
    order = list(lanes)
    events: list[dict[str, Any]] = []
    for pid, (process, spans) in enumerate(timelines.items(), start=1):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": process}})
        for tid, lane in enumerate(order, start=1):
            own = sorted((s for s in spans if s.lane == lane and s.end > s.start), key=lambda s: s.start)
            if not own:
                continue
            name = {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane}}
            sort = {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
            events += [name, sort]
            last = float("-inf")
            for span in own:
                if span.start < last:
                    raise ValueError(f"{process}: {span.name} begins before the span before it on {lane} has ended")
                last = span.end
                at = {"name": span.name, "cat": span.category, "pid": pid, "tid": tid}
                events.append({**at, "ph": "B", "ts": span.start * 1e6, "args": dict(span.args)})
                events.append({**at, "ph": "E", "ts": span.end * 1e6})
    return {"displayTimeUnit": "ms", "traceEvents": events}


def write_trace(path: Path, document: Mapping[str, Any]) -> None:
    """Write the document.

    Raises:
        DiskError: that fails.
    """
    try:
        path.write_text(json.dumps(document, separators=(",", ":")) + "\n")
    except OSError as error:
        raise DiskError(f"{path} cannot be written: {error.strerror}") from error
