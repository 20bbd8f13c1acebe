"""Progress lines: what they say, and that nothing is printed where nobody watches."""

from __future__ import annotations

import io
import threading
import time

import pytest

from ktc import progress
from ktc.progress import Progress, counted, format_bytes, format_seconds, set_verbosity, status, verbosity


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(progress, "time", fake)
    return fake


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KTC_DEBUG", raising=False)
    monkeypatch.setattr(progress, "_verbosity", 0)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10 * 1024, "10.0 KiB"),
        (5_000_000, "4.77 MiB"),
        (1 << 40, "1.00 TiB"),
        (671 << 30, "671 GiB"),
        (1023.9999 * 1024**3, "1024 GiB"),
    ],
)
def test_bytes(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.04, "0.0 s"), (59.5, "59.5 s"), (75, "1:15"), (3661.4, "1:01:01")])
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_rate_and_eta(clock: Clock) -> None:
    with Progress("pack", 100 << 30, "B", stream=io.StringIO()) as p:
        clock.now += 10
        p.update(20 << 30, "layer 3")
        assert p.line() == "pack:  20% 20.0 GiB/100 GiB, 2.00 GiB/s ETA 40.0 s layer 3"


def test_work_of_an_earlier_run_is_shown_but_not_timed(clock: Clock) -> None:
    with Progress("pack", 100, "experts", done=50, stream=io.StringIO()) as p:
        clock.now += 5
        p.update(10)
        assert p.line() == "pack:  60% 60/100 experts, 2/s ETA 20.0 s"


def test_unknown_total(clock: Clock) -> None:
    with Progress("read", unit="files", stream=io.StringIO()) as p:
        clock.now += 2
        p.update(3)
        assert p.line() == "read: 3 files, 1.5/s"


def test_silent_when_nobody_watches(clock: Clock) -> None:
    out = io.StringIO()
    with Progress("pack", 10, "experts", stream=out) as p:
        clock.now += 60
        p.update(5)
    assert out.getvalue() == ""


def test_plain_lines_when_asked_for(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KTC_DEBUG", "1")
    out = io.StringIO()
    with Progress("pack", 10, "experts", stream=out) as p:
        p.update(1)  # too early for a line
        clock.now += 12
        p.update(5)
    assert out.getvalue() == "pack:  60% 6/10 experts, 0.5/s ETA 8.0 s\npack: 6 experts in 12.0 s, 0.5/s\n"


def test_terminal_draws_after_half_a_second_and_cleans_up(clock: Clock) -> None:
    out = Terminal()
    with Progress("pack", 10, "experts", stream=out) as p:
        p.update(1)
        assert out.getvalue() == ""
        clock.now += 1
        p.update(1)
        p.update(1)  # within a tenth of a second: not drawn again
    assert out.getvalue() == "\rpack:  20% 2/10 experts, 2/s ETA 4.0 s\x1b[K\r\x1b[K"  # short: no report


def test_long_phase_leaves_one_line_unless_it_failed(clock: Clock) -> None:
    out = Terminal()
    with Progress("pack", 10, "experts", stream=out) as p:
        clock.now += 5
        p.update(10)
    assert out.getvalue().endswith("\r\x1b[Kpack: 10 experts in 5.0 s, 2/s\n")
    out = Terminal()
    with pytest.raises(RuntimeError), Progress("pack", 10, "experts", stream=out) as p:
        clock.now += 5
        p.update(1)
        raise RuntimeError
    assert out.getvalue().endswith("\r\x1b[K")


def test_a_single_long_piece_of_work_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing calls update for a while: the phase is on the screen all the same."""
    monkeypatch.setattr(progress, "_TICK_SECONDS", 0.01)
    monkeypatch.setattr(progress, "_FIRST_DRAW_SECONDS", 0.02)
    out = Terminal()
    with Progress("build", 4, "libraries", stream=out):
        deadline = time.monotonic() + 20
        while "build:   0% 0/4 libraries" not in out.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "build:   0% 0/4 libraries" in out.getvalue()
    assert not [t for t in threading.enumerate() if t.name == "ktc-progress"]


def test_threads_lose_no_work() -> None:
    with Progress("pack", 4000, "experts", stream=Terminal()) as p:
        threads = [threading.Thread(target=lambda: [p.update() for _ in range(1000)]) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert p.done == 4000


def test_verbosity_is_the_larger_of_flag_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verbosity() == 0
    set_verbosity(2)
    assert verbosity() == 2
    monkeypatch.setenv("KTC_DEBUG", "3")
    assert verbosity() == 3
    monkeypatch.setenv("KTC_DEBUG", "yes")
    assert verbosity() == 2
    set_verbosity(0)
    assert verbosity() == 1
    monkeypatch.setenv("KTC_DEBUG", "0")
    assert verbosity() == 0


def test_status_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, expected in ((io.StringIO(), ""), (Terminal(), "planning ...\r\x1b[K")):
        monkeypatch.setattr("sys.stderr", stream)
        with status("planning"):
            pass
        assert stream.getvalue() == expected


def test_one_is_singular() -> None:
    assert counted(1, "token") == "1 token" and counted(0, "node") == "0 nodes" and counted(2, "node") == "2 nodes"


def test_announcements_are_for_commands_and_have_their_own_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, expected in ((io.StringIO(), "ktc: slow\n"), (Terminal(), "\r\x1b[Kktc: slow\n")):
        monkeypatch.setattr("sys.stderr", stream)
        monkeypatch.setattr(progress, "_announcing", False)
        progress.announce("slow")
        assert stream.getvalue() == ""
        progress.set_announcing()
        progress.announce("slow")
        assert stream.getvalue() == expected
