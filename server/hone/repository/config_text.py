"""config.pbtxt: protobuf text against Triton's own message."""

from __future__ import annotations

from pathlib import Path

from google.protobuf import text_format

from hone.errors import RepositoryError
from hone.protos import config_pb
from hone.repository.files import FileTooLarge, read_limited, reason_of

CONFIG_FILE = "config.pbtxt"
MAX_CONFIG_BYTES = 1024 * 1024
_MAX_MESSAGE = 300


def find_config(folder: Path, config_name: str) -> Path | None:
    """The config file that counts for a model: `configs/NAME.pbtxt` where it exists, else `config.pbtxt`, else none."""
    candidates = [folder / "configs" / f"{config_name}.pbtxt"] if config_name else []
    for path in (*candidates, folder / CONFIG_FILE):
        if path.exists():
            return path
    return None


def read_config(path: Path, model: str) -> config_pb.ModelConfig:
    """Parse a config file. Raises RepositoryError with the file, line and column."""
    shown = path.name if path.name == CONFIG_FILE else f"{path.parent.name}/{path.name}"
    try:
        data = read_limited(path, MAX_CONFIG_BYTES)
    except FileTooLarge as problem:
        raise RepositoryError(model, f"{shown} is {reason_of(problem)}") from problem
    except OSError as problem:
        raise RepositoryError(model, f"cannot read {shown}: {reason_of(problem)}") from problem
    return parse_config(data, model, shown)


def parse_config(data: bytes, model: str, file_name: str = CONFIG_FILE) -> config_pb.ModelConfig:
    """Parse the text of a config file. Raises RepositoryError with line and column, whatever the bytes are."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        line = data.count(b"\n", 0, problem.start) + 1
        column = problem.start - (data.rfind(b"\n", 0, problem.start) + 1) + 1
        raise RepositoryError(
            model, f"cannot parse {file_name}, line {line}, byte {column}: expected UTF-8 text"
        ) from problem
    try:
        return text_format.Parse(text, config_pb.ModelConfig())
    except text_format.ParseError as problem:
        where = f", line {problem.GetLine()}, column {problem.GetColumn()}" if problem.GetLine() is not None else ""
        raise RepositoryError(model, f"cannot parse {file_name}{where}: {_message(problem)}") from problem
    except (RecursionError, ValueError, OverflowError) as problem:
        raise RepositoryError(model, f"cannot parse {file_name}: {type(problem).__name__}") from problem


def _message(problem: text_format.ParseError) -> str:
    """The parser's words, without the position. They quote the whole line, which may be long."""
    text = str(problem)
    prefix = f"{problem.GetLine()}:{problem.GetColumn()} : "
    text = text.removeprefix(prefix)
    printable = "".join(char if char.isprintable() else "?" for char in text)
    return printable if len(printable) <= _MAX_MESSAGE else "…" + printable[-_MAX_MESSAGE:]
