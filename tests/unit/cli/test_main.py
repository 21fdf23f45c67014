"""The command as a whole: its help, exit codes, and that every command can speak JSON."""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from hone.cli.main import main, make_parser

#: What has no JSON to tell: it prints a script.
WITHOUT_JSON = {"completion"}


def commands(parser: argparse.ArgumentParser, name: str = "hone") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command and action that can be run."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield name, parser
    for action in below:
        for word, one in action.choices.items():
            yield from commands(one, f"{name} {word}")


ALL = dict(commands(make_parser()))


def test_help_fits_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = make_parser().format_help()
    assert len(text.splitlines()) <= 24
    assert max(map(len, text.splitlines())) <= 80
    for name in {name.split()[1] for name in ALL}:
        assert f"\n    {name}" in text


@pytest.mark.parametrize("name", ALL)
def test_every_command_is_described_and_speaks_json(name: str) -> None:
    parser = ALL[name]
    assert parser.description
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert "--json" in flags or name.split()[1] in WITHOUT_JSON


@pytest.mark.parametrize("name", ALL)
def test_every_help_can_be_printed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*name.split()[1:], "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: hone ")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["sevre"], "invalid choice: 'sevre'"),
        (["bench", "m", "--cleints=2"], "did you mean '--clients'?"),
        (["config", "check", ".", "--strikt"], "did you mean '--strict'?"),
        (["bench", "m", "--clients=a"], "expected whole numbers separated by commas, found 'a'"),
        (["top", "--sort=x"], "invalid choice: 'x'"),
    ],
)
def test_unusable_arguments(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_an_interruption_has_its_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(arguments: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("hone.cli.doctor.run", interrupted)
    assert main(["doctor"]) == 130


def test_a_reader_that_has_enough() -> None:
    command = f"{sys.executable} -m hone serve --help | head -c 1; echo ${{PIPESTATUS[0]}} >&2"
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run([bash, "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("bench", "--model-repository", "pin_baseline", "check"):
        assert word in script
    checker = shutil.which(shell)
    if checker is not None and shell != "tcsh":
        subprocess.run([checker, "-n"], input=script, text=True, timeout=60, check=True)


def test_bash_completes_commands_flags_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    bash = shutil.which("bash")
    assert bash is not None
    for line, expected in (
        ("hone be", "bench"),
        ("hone bench --cli", "--clients"),
        ("hone tune digits --action pin", "pin_baseline"),
        ("hone config ch", "check"),
    ):
        words = line.split(" ")
        ask = (
            f"{script}\nCOMP_WORDS=({' '.join(words)})\nCOMP_CWORD={len(words) - 1}\nCOMP_LINE='{line}'\n"
            f"COMP_POINT={len(line)}\n_shtab_hone\nprintf '%s\\n' \"${{COMPREPLY[@]}}\"\n"
        )
        done = subprocess.run([bash], input=ask, capture_output=True, text=True, timeout=60, check=True)
        assert expected in done.stdout.split(), line


def test_without_shtab_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    assert "'shtab', which is not installed" in capsys.readouterr().err


def test_a_console_without_a_terminal_is_plain() -> None:
    from hone.cli.terminal import open_console, show, state, table

    out = io.StringIO()
    show(open_console(out), table(("model", "reason"), [("[bold]m[/]", "r" * 500), ("n", state("READY"))]))
    assert out.getvalue().splitlines() == ["model       reason", "[bold]m[/]  " + "r" * 500, "n           READY"]
