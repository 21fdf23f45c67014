"""Putting specializations into served versions and taking them out again, by reference, from any thread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from hone.serving.model import ServedModel
from hone.serving.registry import ModelRegistry
from hone.specialization import Signature, Specialization, VersionRef


class Promotions:
    """Finds the version that a reference means, if it is still the one that is served."""

    def __init__(self, registry: ModelRegistry) -> None:
        self._registry = registry

    def find(self, ref: VersionRef) -> ServedModel | None:
        entry = self._registry.entry(ref.model)
        model = entry.served.get(ref.version) if entry is not None else None
        return model if model is not None and model.ref == ref else None

    def promote(self, ref: VersionRef, specializations: Sequence[Specialization]) -> Mapping[Signature, int] | None:
        """Make them current, all in one step; the generation of each. None, with the engines still the caller's, if the
        version is no longer served."""
        model = self.find(ref)
        if model is None:
            return None
        try:
            numbers = model.slot.promote(specializations)
        except RuntimeError:  # retired in this very moment
            return None
        return {one.signature: number for one, number in zip(specializations, numbers, strict=True)}

    def roll_back(self, ref: VersionRef, generation: int) -> bool:
        """Return what this generation runs to the generation before it, or the baseline; keep it no longer where it is
        only kept to be returned to. False if there is no such generation any more."""
        model = self.find(ref)
        return model is not None and model.slot.roll_back(generation)

    @contextmanager
    def lease(self, ref: VersionRef, generation: int = 0) -> Iterator[bool]:
        """While inside, the version's baseline and that generation stay open; False where either is gone already."""
        model = self.find(ref)
        if model is None:
            yield False
            return
        with model.slot.lease(generation) as held:
            yield held
