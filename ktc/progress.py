"""Progress of one long phase on stderr: how far, how fast, how long still. Not logging.

A bar is drawn only on a terminal and only once a phase has lasted half a second. Elsewhere nothing
is printed, unless `-v` (or KTC_DEBUG) asks for plain lines.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TextIO

_REDRAW_SECONDS = 0.1
_FIRST_DRAW_SECONDS = 0.5
_TICK_SECONDS = 0.5
_PLAIN_LINE_SECONDS = 10.0
_REPORT_SECONDS = 2.0
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")

_verbosity = 0
_announcing = False


def set_verbosity(count: int) -> None:
    """Remember how many `-v` were given; `verbosity()` is the larger of that and KTC_DEBUG."""
    global _verbosity
    _verbosity = count


def verbosity() -> int:
    """0 quiet, 1 phases and choices, 2 details of each phase, 3 and more: generated code and data."""
    text = os.environ.get("KTC_DEBUG", "").strip()
    env = int(text) if text.isdigit() else int(bool(text))
    return max(_verbosity, env)


def announce(text: str) -> None:
    """One line on stderr about work that takes long, on a terminal or not; said by commands only, not by the API."""
    if _announcing:
        clear = "\r\x1b[K" if sys.stderr.isatty() else ""  # a bar or a status of ours may be on this line
        print(f"{clear}ktc: {text}", file=sys.stderr, flush=True)


def set_announcing(on: bool = True) -> None:
    """For the command line: let `announce` speak."""
    global _announcing
    _announcing = on


def format_bytes(count: float) -> str:
    """1536 -> "1.50 KiB". Three significant digits, binary units."""
    for unit in _BINARY:
        if abs(count) < 1024 or unit == _BINARY[-1]:
            break
        count /= 1024
    if unit == "B":
        return f"{count:.0f} B"
    return f"{count:.{2 if abs(count) < 10 else 1 if abs(count) < 100 else 0}f} {unit}"


def format_seconds(seconds: float) -> str:
    """75 -> "1:15"; 3661 -> "1:01:01"; under a minute "12.3 s"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def counted(count: int, noun: str) -> str:
    """(1, "token") -> "1 token"; (2, "token") -> "2 tokens"."""
    return f"{count} {noun}{'s' * (count != 1)}"


@contextmanager
def status(text: str) -> Iterator[None]:
    """Say on a terminal what is going on during a step that has no countable work; erased at its end."""
    tty = sys.stderr.isatty()
    if tty:
        print(f"{text} ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if tty:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


class Progress:
    """One phase: `with Progress("pack", total, "B") as p: ... p.update(n)`. Thread-safe.

    Args:
        phase: a word or two.
        total: amount of work, or None when it is unknown (then no bar and no ETA).
        unit: "B" for bytes (printed in binary units), else a plural noun ("experts", "files").
        done: work that an earlier run already did; shown, but not counted in the rate.
        stream: where to draw; stderr if None.
        report: say at the end how long it took, where that is worth a line; off if the caller does.
    """

    def __init__(
        self,
        phase: str,
        total: int | None = None,
        unit: str = "",
        *,
        done: int = 0,
        stream: TextIO | None = None,
        report: bool = True,
    ) -> None:
        self.phase, self.total, self.unit, self._report = phase, total, unit, report
        self.done = done
        self._start_done = done
        self._detail = ""
        self._stream = stream if stream is not None else sys.stderr
        self._tty = self._stream.isatty()
        self._plain = not self._tty and verbosity() > 0
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._next = self._started + (_FIRST_DRAW_SECONDS if self._tty else _PLAIN_LINE_SECONDS)
        self._drawn = False
        self._stop = threading.Event()
        self._ticker: threading.Thread | None = None

    def __enter__(self) -> Progress:
        self._started = time.monotonic()
        if self._tty or self._plain:  # a single long piece of work must not look like a hang
            self._ticker = threading.Thread(target=self._tick, name="ktc-progress", daemon=True)
            self._ticker.start()
        return self

    def _tick(self) -> None:
        while not self._stop.wait(_TICK_SECONDS):
            self.update(0)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._ticker is not None:
            self._ticker.join()
        with self._lock:
            if self._tty and self._drawn:
                self._stream.write("\r\x1b[K")
            seconds = time.monotonic() - self._started
            if kind is None and self._report and (self._plain or (self._tty and seconds >= _REPORT_SECONDS)):
                self._stream.write(
                    f"{self.phase}: {self._amount(self.done)} in {format_seconds(seconds)}{self._rate()}\n"
                )
            self._stream.flush()

    def update(self, amount: int = 1, detail: str | None = None) -> None:
        """Add finished work; `detail` (a file, a layer) is shown after the figures until the next one."""
        with self._lock:
            self.done += amount
            if detail is not None:
                self._detail = detail
            if not (self._tty or self._plain):
                return
            now = time.monotonic()
            if now < self._next:
                return
            self._next = now + (_REDRAW_SECONDS if self._tty else _PLAIN_LINE_SECONDS)
            self._draw()

    def _draw(self) -> None:
        if self._plain:
            self._stream.write(self.line() + "\n")
        else:
            width = max(20, shutil.get_terminal_size((100, 24)).columns - 1)
            self._stream.write("\r" + self.line()[:width] + "\x1b[K")
            self._drawn = True
        self._stream.flush()

    def line(self) -> str:
        """The current state as one line of text."""
        parts = [f"{self.phase}:"]
        if self.total:
            parts.append(f"{100 * self.done / self.total:3.0f}%")
            parts.append(f"{self._amount(self.done, unit=False)}/{self._amount(self.total)}{self._rate()}")
            seconds = self._eta()
            if seconds is not None:
                parts.append(f"ETA {format_seconds(seconds)}")
        else:
            parts.append(f"{self._amount(self.done)}{self._rate()}")
        if self._detail:
            parts.append(self._detail)
        return " ".join(parts)

    def _amount(self, count: int, unit: bool = True) -> str:
        if self.unit == "B":
            return format_bytes(count)
        return f"{count} {self.unit}" if unit and self.unit else str(count)

    def _speed(self) -> float:
        seconds = time.monotonic() - self._started
        return (self.done - self._start_done) / seconds if seconds > 0 else 0.0

    def _rate(self) -> str:
        speed = self._speed()
        if speed <= 0:
            return ""
        return f", {format_bytes(speed)}/s" if self.unit == "B" else f", {speed:.3g}/s"

    def _eta(self) -> float | None:
        speed = self._speed()
        if not self.total or speed <= 0 or self.done >= self.total:
            return None
        return (self.total - self.done) / speed
