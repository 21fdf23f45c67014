"""Everything that is wrong with a repository's models, with lines and suggestions: what `hone config check` tells."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from google.protobuf import text_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from hone.cli import pbtxt
from hone.errors import ConfigError, HoneError, RepositoryError
from hone.protos import config_pb
from hone.repository import ModelRepository, complete
from hone.repository.accelerators import validate_accelerators
from hone.repository.config_text import CONFIG_FILE, find_config
from hone.repository.files import is_ignored
from hone.repository.layout import model_names
from hone.repository.validation import validate
from hone.repository.validation_scheduling import validate_scheduling
from hone.repository.validation_tensors import validate_tensors

Severity = Literal["error", "warning"]
MODEL_FILE = "model.onnx"
_PLAIN_VERSION = re.compile(r"[1-9][0-9]*")
#: Each finds one fault at most, so the parts are asked as well as the whole.
_Check = Callable[[config_pb.ModelConfig, str], None]
_PARTS: tuple[_Check, ...] = (
    validate_tensors,
    validate_scheduling,
    validate_accelerators,
)


@dataclass(frozen=True, slots=True)
class Finding:
    """`line` and `column` count from 1, and are 0 where the finding is about a file or folder as a whole."""

    model: str
    file: str
    line: int
    column: int
    severity: Severity
    field: str
    message: str

    @property
    def text(self) -> str:
        """As compilers write, so that editors find the place."""
        place = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        return f"{place}: {self.severity}: {f'{self.field}: ' if self.field else ''}{self.message}"


def models_of(path: Path) -> list[Path]:
    """Folders of the models that a path means: a repository's, one model's own, or that of a config file.
    Raises FileNotFoundError or another OSError."""
    if path.is_file():
        return [path.parent.parent if path.parent.name == "configs" else path.parent]
    if (path / CONFIG_FILE).is_file() or any((folder / MODEL_FILE).exists() for folder in _versions(path)):
        return [path]
    return [path / name for name in model_names(path)]


def lint(
    folder: Path, config_name: str = "", *, graph: bool = True, num_gpus: int = 0, machine: str = "this machine"
) -> list[Finding]:
    """All findings about one model; with `graph` its newest version is loaded as the server would. `num_gpus` are those
    of the machine that the model is meant for, which findings call `machine`."""
    folder = folder.absolute()
    checker = _Checker(folder, config_name, num_gpus, machine)
    checker.check(graph=graph)
    unique = dict.fromkeys(checker.findings)
    return sorted(unique, key=lambda one: (one.file, one.line, one.column, one.message))


class _Checker:
    def __init__(self, folder: Path, config_name: str, num_gpus: int, machine: str) -> None:
        self.findings: list[Finding] = []
        self._folder = folder
        self._config_name = config_name
        self._num_gpus, self._machine = num_gpus, machine
        self._config = find_config(folder, config_name)
        self._tree: pbtxt.Field | None = None

    def check(self, *, graph: bool) -> None:
        self._check_names()
        num_before = len(self.findings)
        if self._config is not None:
            self._check_config(self._config)
        if any(one.severity == "error" for one in self.findings[num_before:]):
            return
        try:
            repository = ModelRepository([self._folder.parent], config_name=self._config_name, num_gpus=self._num_gpus)
            try:
                definition = repository.read(self._folder.name)
                if graph:
                    self._check_graph(definition.versions[max(definition.versions)], definition.config)
            finally:
                repository.close()
        except ConfigError as problem:
            self._add_config_error(problem)
        except RepositoryError as problem:
            self._add("error", "", problem.reason)
        except HoneError as problem:
            self._add("error", "", str(problem))

    def _add(
        self, severity: Severity, field: str, message: str, path: Path | None = None, line: int = 0, column: int = 0
    ) -> None:
        file = str(_shown(path or self._folder))
        self.findings.append(Finding(self._folder.name, file, line, column, severity, field, message))

    # --- names of files and folders

    def _check_names(self) -> None:
        for path in sorted(self._folder.iterdir()):
            if is_ignored(path.name):
                continue
            if path.is_dir() and (path / MODEL_FILE).exists() and not _PLAIN_VERSION.fullmatch(path.name):
                digits = re.sub(r"\D", "", path.name).lstrip("0") or "1"
                self._add(
                    "warning", "", f"'{path.name}' is no version and is passed over: rename it to '{digits}'", path
                )
            elif path.is_file() and path.suffix == ".onnx":
                self._add("warning", "", f"a model lies in a version's folder: move it to '1/{MODEL_FILE}'", path)
            elif (
                path.is_file()
                and path.name != CONFIG_FILE
                and difflib.get_close_matches(path.name.lower(), [CONFIG_FILE], cutoff=0.8)
            ):
                self._add("warning", "", f"is not read; did you mean '{CONFIG_FILE}'?", path)

    # --- config.pbtxt

    def _check_config(self, path: Path) -> None:
        try:
            text = path.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError:
            return  # told with its place by whoever reads the model
        try:
            self._tree = pbtxt.parse(text)
        except pbtxt.Malformed as problem:
            self._add("error", "", str(problem), path, problem.line, problem.column)
            return
        unknown = list(_unknown(self._tree, config_pb.ModelConfig.DESCRIPTOR, ""))
        for where, field, message in unknown:
            self._add("error", field, message, path, *where)
        config = config_pb.ModelConfig()
        try:
            text_format.Parse(text, config, allow_unknown_field=bool(unknown))
        except text_format.ParseError as problem:
            line, column = problem.GetLine() or 1, problem.GetColumn() or 1
            if all(where[0] != line for where, _, _ in unknown):
                # The parser's words are "LINE:COLUMN : 'the whole line': what is wrong".
                message = str(problem).removeprefix(f"{line}:{column} : ").rpartition("': ")[2]
                self._add("error", "", message, path, line, column)
            return
        whole: _Check = partial(validate, num_gpus=self._num_gpus, machine=self._machine)
        for check in (whole, *_PARTS):
            try:
                check(config, self._folder.name)
            except ConfigError as problem:
                self._add_config_error(problem)

    def _add_config_error(self, problem: ConfigError) -> None:
        found = pbtxt.find(self._tree, problem.field) if self._tree is not None and problem.field else None
        message = f"{problem.reason}{_hint(problem)}"
        line, column = (found.line, found.column) if found is not None else (0, 0)
        self._add("error", problem.field, message, self._config, line, column)

    # --- the graph

    def _check_graph(self, path: Path, config: Any) -> None:
        from hone.serving.lifecycle import BaselineLoader

        try:
            engine = BaselineLoader(1)(path, config)
        except HoneError as problem:
            self._add("error", "", f"ONNX Runtime does not take it: {problem}", path)
            return
        try:
            complete(
                config,
                engine.inputs,
                engine.outputs,
                model=self._folder.name,
                initializers=engine.initializers,
                num_gpus=self._num_gpus,
            )
        finally:
            engine.close()


def _unknown(message: pbtxt.Field, descriptor: Descriptor, path: str) -> Iterator[tuple[tuple[int, int], str, str]]:
    """Fields and enumeration values that there are not: place, path, what is wrong."""
    counts: dict[str, int] = {}
    for written in message.fields:
        known = descriptor.fields_by_name.get(written.name)
        where = (written.line, written.column)
        prefix = f"{path}." if path else ""
        if known is None:
            names = [field.name for field in descriptor.fields]
            yield where, f"{prefix}{written.name}", f"unknown field{suggestion(written.name, names)}"
            continue
        number = counts[written.name] = counts.get(written.name, -1) + 1
        own = f"{prefix}{written.name}{f'[{number}]' if known.is_repeated else ''}"
        if known.type == FieldDescriptor.TYPE_MESSAGE:
            if written.value is None and known.message_type is not None:
                yield from _unknown(written, known.message_type, own)
        elif known.type == FieldDescriptor.TYPE_ENUM and known.enum_type is not None and written.value is not None:
            values = known.enum_type.values_by_name
            if written.value not in values and not written.value.lstrip("-").isdigit():
                place = (written.value_line, written.value_column)
                yield place, own, f"unknown value '{written.value}'{suggestion(written.value, list(values))}"


def suggestion(name: str, known: Collection[str]) -> str:
    """The nearest known name; where none is near and they are few, all of them."""
    by_case = {one.lower(): one for one in known}
    close = difflib.get_close_matches(name.lower(), list(by_case), n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{by_case[close[0]]}'?"
    for prefix in ("type_", "kind_"):  # people write FP32 for TYPE_FP32
        if prefix + name.lower() in by_case:
            return f"; did you mean '{by_case[prefix + name.lower()]}'?"
    return f", expected one of {', '.join(known)}" if len(known) <= 20 else ""


def _hint(problem: ConfigError) -> str:
    """The nearest of the words that a refusal lists, for the one that it quotes."""
    quoted = re.search(r'(?:found \'([^\']+)\'|parameters\["([^"]+)"\])', f"{problem.field} {problem.reason}")
    listed = re.search(r"expected (?:one of )?([\w', |]+?)(?:, found|$)", problem.reason)
    if not quoted or not listed:
        return ""
    words = [word.strip(" '") for word in re.split(r"[|,]", listed[1])]
    word = quoted[1] if "found '" in problem.reason else quoted[2]
    close = difflib.get_close_matches(word or "", words, n=1)
    return f"; did you mean '{close[0]}'?" if close and len(words) > 1 else ""


def _versions(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir() and _PLAIN_VERSION.fullmatch(path.name)]


def _shown(path: Path) -> Path:
    """From the working directory where it lies there, as compilers write names."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
