"""A request's say in which engine runs it, by the parameter `hone_engine`: for comparing both while others are served
as ever. Requests without it, which is nearly all, never come here."""

from __future__ import annotations

from collections.abc import Mapping

from hone.errors import InvalidRequest, Unavailable
from hone.serving.slot import Generation, RouteKey, Slot
from hone.types import ENGINE_PARAMETER, ParameterValue

BASELINE, TUNED = "baseline", "tuned"


def chosen_engine(parameters: Mapping[str, ParameterValue]) -> str:
    """`BASELINE`, `TUNED`, or nothing where the request leaves it to the server. Raises InvalidRequest."""
    value = parameters.get(ENGINE_PARAMETER)
    if value is None:
        return ""
    if value in (BASELINE, TUNED):
        return str(value)
    raise InvalidRequest(f"'{ENGINE_PARAMETER}' parameter must be '{BASELINE}' or '{TUNED}', got '{str(value)[:40]}'")


def chosen(slot: Slot, choice: str, model: str, key: RouteKey, rows: int, device: str) -> Generation:
    """Lease the generation that a request asked for. Raises Unavailable where nothing tuned runs these shapes."""
    if choice == BASELINE:
        return slot.acquire_baseline()
    generation = slot.acquire(key, rows, device)
    if not generation.number:
        generation.release()
        raise Unavailable(f"no tuned engine runs a batch of {rows} of these shapes for model '{model}' now")
    return generation
