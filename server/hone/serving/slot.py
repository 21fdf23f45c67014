"""A model version's slot: which generation runs an execution, and when an old one may be closed.

A generation is one engine as loaded here: the baseline (number 0, runs anything) or a specialization, which runs one
signature, and smaller batches padded up to it, on executors of its own kind of device. Executions hold a lease on the
generation they run; a retired generation closes when its last lease ends. Route tables are never changed, only
replaced, under a lock that guards fields and no work: nothing is loaded, warmed, run or closed under it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from hone.specialization import CPU, DEVICE_ORDINAL, Specialization
from hone.types import Engine, EngineInstance, Shape

#: Shapes of an execution's inputs in the model's order, without the batch axis where the model batches; None for an
#: optional input that is left out.
RouteKey: TypeAlias = tuple[Shape | None, ...]


class Generation:
    """One loaded engine with the count of its users, and its instance for each thread and device that have run it."""

    __slots__ = ("_instances", "_leases", "_lock", "_retired", "artifact", "engine", "mark", "number", "rows")

    def __init__(self, number: int, engine: Engine, rows: int = 0, artifact: str = "", mark: int = 0) -> None:
        self.number = number
        self.engine = engine
        self.rows = rows
        """The batch it takes, exactly; 0 for any."""
        self.artifact = artifact
        self.mark = mark
        """What threads note down while they run it; see `specialization.RunningMarks`."""
        self._lock = threading.Lock()
        self._leases = 0
        self._retired = False
        self._instances: dict[tuple[int, int], EngineInstance] = {}

    def acquire(self) -> bool:
        """Begin a lease; False when the generation is retired."""
        with self._lock:
            if self._retired:
                return False
            self._leases += 1
            return True

    def release(self) -> None:
        with self._lock:
            self._leases -= 1
            close = self._retired and self._leases == 0
        if close:
            self._close()

    def instance(self) -> EngineInstance:
        """The calling thread's own instance; the caller holds a lease."""
        # A thread that begins later may get the number of one that has ended, and belong to another device.
        key = (threading.get_ident(), DEVICE_ORDINAL.get())
        instance = self._instances.get(key)
        if instance is None:
            instance = self._instances[key] = self.engine.instantiate()
        return instance

    def retire(self) -> None:
        """Close the engine once nobody uses it: now, or on the thread that ends the last lease. May be called again."""
        with self._lock:
            close = not self._retired and self._leases == 0
            self._retired = True
        if close:
            self._close()

    def _close(self) -> None:
        self._instances.clear()  # instances die before their engine: they may hold what it unloads
        self.engine.close()


@dataclass(frozen=True, slots=True)
class _Range:
    """Batches of `min_rows` to the generation's rows go to this generation. `before` is what ran them until then."""

    min_rows: int
    generation: Generation
    before: _Range | None = None


_Routes: TypeAlias = dict[RouteKey, tuple[_Range, ...]]
#: By kind of device. Neither level is changed once it can be seen.
_Table: TypeAlias = MappingProxyType[str, _Routes]

_NO_ROUTES: _Routes = {}


class Slot:
    """The generations of one model version. All methods are safe to call from any thread."""

    def __init__(
        self,
        baseline: Engine,
        input_names: Sequence[str] = (),
        *,
        batching: bool = False,
        numbers: Iterator[int] | None = None,
    ) -> None:
        """`numbers` gives generations their numbers; slots that share it never give one twice."""
        self.baseline = Generation(0, baseline)
        self._numbers = numbers or itertools.count(1)
        self._input_names = tuple(input_names)
        self._batching = batching
        self._lock = threading.Lock()
        self._table: _Table = MappingProxyType({})
        self._closed = False

    def acquire(self, key: RouteKey, rows: int, device: str = CPU) -> Generation:
        """Lease the generation that runs these shapes on a kind of device; the caller releases it. Raises RuntimeError
        when closed."""
        while True:
            generation = self.baseline
            for route in self._table.get(device, _NO_ROUTES).get(key, ()):
                if route.min_rows <= rows <= route.generation.rows:
                    generation = route.generation
                    break
            if generation.acquire():
                return generation
            if self._closed:  # leases on the model outlive its executions, so this is a fault of the caller
                raise RuntimeError("the slot is closed")

    def acquire_baseline(self) -> Generation:
        """Lease the baseline, whatever runs else; the caller releases it. Raises RuntimeError when closed."""
        if not self.baseline.acquire():
            raise RuntimeError("the slot is closed")
        return self.baseline

    def promote(self, specializations: Sequence[Specialization]) -> list[int]:
        """Make these current, all in one step, each in place of what ran its signature. Returns their numbers.

        What each replaces stays loaded, to be returned to; what that had replaced in turn is retired. The slot takes
        the engines over. Raises RuntimeError when closed: the engines are then still the caller's.
        """
        retired: list[Generation] = []
        with self._lock:
            if self._closed:
                raise RuntimeError("the slot is closed")
            table = {device: dict(routes) for device, routes in self._table.items()}
            numbers = []
            for one in specializations:
                number = next(self._numbers)
                numbers.append(number)
                key, rows = self._place(one)
                generation = Generation(number, one.engine, max(rows, 1), one.artifact, one.mark)
                routes = table.setdefault(one.device, {})
                ranges = list(routes.get(key, ()))
                old = next((route for route in ranges if route.generation.rows == generation.rows), None)
                if old is not None:
                    ranges.remove(old)
                    if old.before is not None:
                        retired.append(old.before.generation)
                    old = _Range(old.min_rows, old.generation)
                ranges.append(_Range(max(one.min_rows, 1), generation, old))
                # The smallest batch that fits is tried first: it pads least.
                routes[key] = tuple(sorted(ranges, key=lambda route: route.generation.rows))
            self._table = MappingProxyType(table)
        for gone in retired:
            gone.retire()
        return numbers

    def roll_back(self, number: int) -> bool:
        """Return what this generation runs to the generation before it, or to the baseline; one that is only kept to be
        returned to is kept no longer. False if there is no such generation any more."""
        with self._lock:
            for device, key, route in self._routes():
                before = route.before
                if route.generation.number == number:
                    gone, left = route.generation, before
                elif before is not None and before.generation.number == number:
                    gone, left = before.generation, _Range(route.min_rows, route.generation)
                else:
                    continue
                routes = self._table[device]
                kept = [other for other in routes[key] if other is not route]
                if left is not None:
                    kept.append(left)
                kept.sort(key=lambda other: other.generation.rows)
                self._table = MappingProxyType({**self._table, device: {**routes, key: tuple(kept)}})
                break
            else:
                return False
        gone.retire()
        return True

    @contextmanager
    def lease(self, number: int) -> Iterator[bool]:
        """While inside, the baseline and that generation stay open; False where either is gone already."""
        held: list[Generation] = []
        try:
            wanted = {0, number}
            held.extend(one for one in self.current() if one.number in wanted and one.acquire())
            yield len(held) == len(wanted)
        finally:
            for generation in held:
                generation.release()

    def current(self) -> list[Generation]:
        """Generations that run something now, the baseline first."""
        return [self.baseline, *(route.generation for _, _, route in self._routes())]

    def take_over(self, other: Slot) -> None:
        """Continue the specializations of a slot of the same graph, which then runs its baseline alone.

        For reloads that change the configuration only; call it before either slot can be closed.
        """
        if (self._input_names, self._batching) != (other._input_names, other._batching):
            return
        with other._lock:
            table, other._table = other._table, MappingProxyType({})
        with self._lock:
            self._table = table

    def close(self) -> None:
        """Retire every generation. Called once no execution can begin any more."""
        with self._lock:
            self._closed = True
            left = [route for _, _, route in self._routes()]
            self._table = MappingProxyType({})
        for route in left:
            route.generation.retire()
            if route.before is not None:
                route.before.generation.retire()
        self.baseline.retire()

    def _routes(self) -> Iterator[tuple[str, RouteKey, _Range]]:
        """All that is in the table as it is now: kind of device, key, route."""
        for device, routes in self._table.items():
            for key, ranges in routes.items():
                for route in ranges:
                    yield device, key, route

    def _place(self, specialization: Specialization) -> tuple[RouteKey, int]:
        shapes = specialization.signature.shapes
        if not self._batching:
            return tuple(shapes.get(name) for name in self._input_names), 1
        key = tuple(shapes[name][1:] if name in shapes else None for name in self._input_names)
        return key, specialization.signature.rows
