"""Everything hone can answer with instead of a result: one tree, protocol-neutral.

Each front end holds one table from `ErrorKind` to its own status code; nothing here knows of HTTP or gRPC.
Messages follow Triton's wording where clients match on it, and never name files (but those of a model,
by their path in its folder), keys or addresses of the server.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager


class ErrorKind(enum.Enum):
    """What went wrong, as a client must understand it."""

    INVALID_ARGUMENT = "invalid_argument"
    NOT_FOUND = "not_found"
    ALREADY_EXISTS = "already_exists"
    UNAVAILABLE = "unavailable"
    INTERNAL = "internal"
    UNSUPPORTED = "unsupported"
    CANCELLED = "cancelled"
    RESTRICTED = "restricted"


class HoneError(Exception):
    """Root of every expected error; `kind` decides the status code, `str(error)` is what the client reads."""

    kind: ErrorKind = ErrorKind.INTERNAL


class InternalError(HoneError):
    """A fault of the server or of an engine, told without internals."""


class InvalidRequest(HoneError):
    """The request cannot be understood or does not fit the model."""

    kind = ErrorKind.INVALID_ARGUMENT


class RequestCancelled(HoneError):
    """The client went away or cancelled before the answer was ready."""

    kind = ErrorKind.CANCELLED

    def __init__(self) -> None:
        super().__init__("Request was cancelled by the client")


class Unsupported(HoneError):
    """A feature of the protocol or of the configuration that this server does not offer."""

    kind = ErrorKind.UNSUPPORTED


class Unavailable(HoneError):
    """Right request, wrong moment: the server is stopping, or the mode forbids it."""

    kind = ErrorKind.UNAVAILABLE


class QueueFull(Unavailable):
    def __init__(self, model: str) -> None:
        super().__init__(f"Exceeds maximum queue size for model '{model}'")


class QueueTimeout(Unavailable):
    def __init__(self, model: str) -> None:
        super().__init__(f"Request timeout expired for model '{model}'")


class ServerStopping(Unavailable):
    def __init__(self, model: str | None = None) -> None:
        what = f"scheduler for model '{model}' has" if model else "it has"
        super().__init__(f"Server is stopping, {what} stopped accepting new inference requests")


class NotFound(HoneError):
    kind = ErrorKind.NOT_FOUND


class ModelNotFound(NotFound):
    def __init__(self, model: str, version: int | None = None) -> None:
        which = f"'{model}'" if version is None else f"'{model}' version {version}"
        super().__init__(f"Request for unknown model: {which} is not found")


class NoVersionAvailable(NotFound):
    """The model is known, and none of its versions can answer."""

    def __init__(self, model: str) -> None:
        super().__init__(f"Request for unknown model: '{model}' has no available versions")


class VersionNotReady(Unavailable):
    """The version exists and is being loaded or unloaded."""

    def __init__(self, model: str, version: int) -> None:
        super().__init__(f"Request for unknown model: '{model}' version {version} is not at ready state")


class AlreadyExists(HoneError):
    kind = ErrorKind.ALREADY_EXISTS


class Restricted(HoneError):
    """The endpoint belongs to a group that needs a key."""

    kind = ErrorKind.RESTRICTED


class ConfigError(HoneError):
    """A model's configuration is wrong: `model`, the `field` as a config.pbtxt path, and the reason. `file` is where
    the configuration was written, by its path in the model's folder, as far as that is known."""

    kind = ErrorKind.INVALID_ARGUMENT

    def __init__(self, model: str, field: str, reason: str) -> None:
        self.model, self.field, self.reason = model, field, reason
        self.file = ""
        super().__init__(model, field, reason)

    def __str__(self) -> str:
        where = "".join(f"{part}: " for part in (self.file, self.field) if part)
        return f"invalid model configuration for '{self.model}': {where}{self.reason}"


@contextmanager
def written_in(file: str) -> Iterator[None]:
    """A ConfigError that is raised inside tells that the configuration was written in this file."""
    try:
        yield
    except ConfigError as problem:
        problem.file = problem.file or file
        raise


class RepositoryError(HoneError):
    """What is on disk cannot be taken: `failed to load 'X', failed to poll from model repository: reason`."""

    kind = ErrorKind.INTERNAL

    def __init__(self, model: str, reason: str) -> None:
        self.model, self.reason = model, reason
        super().__init__(f"failed to load '{model}', failed to poll from model repository: {reason}")


class ModelNotInRepository(RepositoryError):
    def __init__(self, model: str) -> None:
        super().__init__(model, "model not found in any model repository")


class LoadFailed(HoneError):
    """The files were found, and a version did not come up."""

    kind = ErrorKind.INVALID_ARGUMENT

    def __init__(self, model: str, reasons: Iterable[tuple[int, str]]) -> None:
        told = " ".join(f"version {version} is at UNAVAILABLE state: {reason};" for version, reason in reasons)
        super().__init__(f"load failed for model '{model}': {told}")


class EngineError(HoneError):
    """An engine could not be made or could not run; `reason` is its own explanation."""

    kind = ErrorKind.INTERNAL


class DeviceLost(EngineError):
    """An engine cannot run because its process can use the GPU no longer. Nothing is wrong with the engine: another one
    broke the GPU's context, or was at work when it broke."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the GPU is lost: {reason}")


class InputsDeclined(EngineError):
    """A tuned engine leaves these inputs to the baseline, which has its own answer to them, most likely an error: an
    index out of range, a division by zero. Nothing is wrong with the engine."""


class EngineBusy(InputsDeclined):
    """A tuned engine cannot run at this moment, and nothing is wrong with it: soon it can."""


# --- requests that do not fit the model, in Triton's words ---------------------------------------------------------


def missing_inputs(
    model: str, required: int, optional: int, given: Sequence[str], missing: Sequence[str]
) -> InvalidRequest:
    count = f"{required} inputs" if not optional else f"number of inputs between {required} and {required + optional}"
    return InvalidRequest(
        f"expected {count} but got {len(given)} inputs for model '{model}'. Got input(s) {list(given)!r},"
        f" but missing required input(s) {list(missing)!r}. Please provide all required input(s)."
    )


def unexpected_input(model: str, name: str) -> InvalidRequest:
    return InvalidRequest(f"unexpected inference input '{name}' for model '{model}'")


def unexpected_output(model: str, name: str) -> InvalidRequest:
    return InvalidRequest(f"unexpected inference output '{name}' for model '{model}'")


def duplicate_tensor(what: str, name: str) -> InvalidRequest:
    return InvalidRequest(f"{what} '{name}' already exists in request")


def wrong_datatype(model: str, name: str, given: str, expected: str) -> InvalidRequest:
    return InvalidRequest(f"inference input '{name}' data-type is '{given}', but model '{model}' expects '{expected}'")


def wrong_shape(
    model: str, name: str, given: Sequence[int], expected: Sequence[int], *, batching: bool
) -> InvalidRequest:
    note = (
        " NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to"
        " each input shape. If you want to specify the full shape including the batch dim in your input dims config,"
        " try setting max_batch_size to zero."
        if batching
        else ""
    )
    return InvalidRequest(
        f"unexpected shape for input '{name}' for model '{model}'."
        f" Expected {_dims(expected)}, got {_dims(given)}.{note}"
    )


def no_batch_dimension(model: str, name: str) -> InvalidRequest:
    return InvalidRequest(f"input '{name}' has no shape but model requires batch dimension for '{model}'")


def different_batch_sizes(model: str, name: str) -> InvalidRequest:
    return InvalidRequest(f"input '{name}' batch size does not match other inputs for '{model}'")


def batch_too_large(model: str, limit: int, given: int) -> InvalidRequest:
    return InvalidRequest(f"inference request batch-size must be <= {limit} for '{model}', got {given}")


def input_byte_size(model: str, name: str, expected: int, given: int) -> InvalidRequest:
    return InvalidRequest(
        f"input byte size mismatch for input '{name}' for model '{model}'. Expected {expected}, got {given}"
    )


def _dims(shape: Sequence[int]) -> str:
    return "[" + ",".join(str(d) for d in shape) + "]"
