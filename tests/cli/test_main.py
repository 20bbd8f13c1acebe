"""The command line around the subcommands: finding them, and one clear exit for every way to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import ktc
from ktc.cli.main import COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]
ENDINGS = "from ktc.cli.main import COMMANDS, main; COMMANDS['end'] = ('tests.cli.endings:command', ''); "


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KTC_DEBUG", raising=False)
    monkeypatch.setitem(COMMANDS, "end", ("tests.cli.endings:command", "Ends."))


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(list(args))
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


def process(code: str, **options: object) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        cwd=ROOT,
        **options,
    )


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"ktc {ktc.__version__}\n"


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in COMMANDS)


def test_no_arguments_is_help_and_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 2
    assert "Commands:" in capsys.readouterr().err


def test_the_table_and_help_import_nothing_heavy() -> None:
    """`ktc --help` must answer at once: no torch, transformers or numpy, and little CPU time."""
    code = (
        "import resource, sys\n"
        "from ktc.cli.main import main\n"
        "import ktc.recipe\n"
        "try:\n    main(['--help'])\n"
        "finally:\n"
        "    use = resource.getrusage(resource.RUSAGE_SELF)\n"
        "    heavy = {'torch', 'transformers', 'numpy', 'jsonschema', 'safetensors'} & set(sys.modules)\n"
        "    print(use.ru_utime + use.ru_stime, sorted(heavy), file=sys.stderr)\n"
    )
    results = []
    for _ in range(3):  # the least of three: other tests share the machine
        out, err = process(code).communicate(timeout=60)
        assert "Commands:" in out
        seconds, _, heavy = err.strip().partition(" ")
        assert heavy == "[]"
        results.append(float(seconds))
    assert min(results) < 0.5


def test_python_m_ktc() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ktc", "--version"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, f"ktc {ktc.__version__}\n")


@pytest.mark.parametrize(("typed", "meant"), [("pln", "plan"), ("compil", "compile"), ("verfy", "verify")])
def test_unknown_command_suggests(typed: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(typed) == 2
    err = capsys.readouterr().err
    assert f"ktc: error: no command named '{typed}'; did you mean {meant}" in err
    assert "hint: ktc --help" in err


def test_unknown_command_unlike_any_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("xyzzy", "help"):
        assert run(name) == 2
        assert "commands: compile, plan, run," in capsys.readouterr().err


def test_unknown_option_points_at_the_commands_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "--nods", "2", "x") == 2
    err = capsys.readouterr().err
    assert err.startswith("ktc: error: No such option") and "hint: ktc plan --help" in err


def test_ktc_error_is_two_lines_and_its_own_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("end", "ktc-error") == 6
    assert capsys.readouterr().err == "ktc: error: bundle x.ktc is damaged\n  hint: run ktc compile again\n"


def test_ktc_debug_adds_the_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KTC_DEBUG", "1")
    assert run("end", "ktc-error") == 6
    err = capsys.readouterr().err
    assert "Traceback" in err and "endings.py" in err
    assert err.endswith("ktc: error: bundle x.ktc is damaged\n  hint: run ktc compile again\n")


def test_anything_else_is_a_bug_in_ktc(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("end", "bug") == 70
    err = capsys.readouterr().err
    assert err.startswith("ktc: error: ZeroDivisionError: division by zero (this is a bug in ktc ")
    assert "KTC_DEBUG=1" in err and "Traceback" not in err and err.count("\n") == 2
    assert run("end", "not-found") == 70  # a file of ktc's own: not the user's fault


def test_faults_of_the_machine_are_no_bugs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("end", "disk-full") == 1
    assert capsys.readouterr().err == "ktc: error: No space left on device: /data/out\n"
    assert run("end", "long-name") == 1
    err = capsys.readouterr().err
    assert err.startswith("ktc: error: File name too long: aaa") and len(err) < 400
    assert run("end", "memory") == 1
    assert "out of memory" in capsys.readouterr().err


def test_what_an_installation_lacks_is_no_bug(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("end", "no-runtime") == 1
    assert "the native runtime cannot be loaded" in capsys.readouterr().err
    assert run("end", "no-package") == 1
    assert capsys.readouterr().err.endswith("package jinja2 is not installed\n  hint: pip install jinja2\n")
    assert run("end", "wrong-import") == 70


@pytest.mark.parametrize("closed", ["0", "1", "2", "012"])
def test_closed_streams_are_no_fault(closed: str) -> None:
    code = ENDINGS + "main(['plan', 'no such checkpoint'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: [os.close(int(n)) for n in closed],  # type: ignore[arg-type,return-value]
        timeout=120,
    )
    assert done.returncode == 3
    assert b"Traceback" not in done.stderr and (b"ktc: error: " in done.stderr) == ("2" not in closed)


def test_an_interrupt_during_the_first_imports_is_quiet() -> None:
    code = (
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'click':\n            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from ktc.__main__ import main\nmain()\n"
    )
    _, err = (running := process(code)).communicate(timeout=120)
    assert (running.returncode, err) == (130, "")


def test_an_interrupt_does_not_wait_for_the_interpreter_to_clear_up() -> None:
    code = (
        "import atexit, sys, time\n"
        "from ktc.cli.main import COMMANDS\n"
        "from ktc.__main__ import main\n"
        "COMMANDS['end'] = ('tests.cli.endings:command', '')\n"
        "atexit.register(time.sleep, 600)\n"
        "sys.argv = ['ktc', 'end', 'interrupt']\n"
        "main()\n"
    )
    _, err = (running := process(code)).communicate(timeout=120)
    assert (running.returncode, err) == (130, "\nktc: interrupted\n")


def test_a_command_may_return_its_exit_code() -> None:
    assert run("end", "code") == 6
    assert run("end", "nothing") == 0


def test_interrupt_in_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("end", "interrupt") == 130
    assert capsys.readouterr().err == "\nktc: interrupted\n"


def test_interrupt_by_signal() -> None:
    child = process(ENDINGS + "main(['end', 'sleep'])")
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=30)
    assert (child.returncode, err) == (130, "\nktc: interrupted\n")


def test_a_reader_that_goes_away_is_no_error() -> None:
    child = process(ENDINGS + "main(['end', 'talk'])")
    assert child.stdout is not None and child.stderr is not None
    assert child.stdout.readline() == "line 0\n"
    child.stdout.close()
    err = child.stderr.read()
    assert (child.wait(timeout=30), err) == (141, "")
    child.stderr.close()


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_of_the_table_exists(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(name, "--help") == 0
    assert f"ktc {name}" in capsys.readouterr().out
