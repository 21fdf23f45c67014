"""Which signatures of a model version have a specialization, when more are worth one than there are places."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass

from hone.specialization import Signature

#: Signatures of a model version that are specialized at once, on each kind of device.
MAX_SIGNATURES = 16
#: What takes another's place was used so many times as often, and so much more often: traffic that goes back and forth,
#: and chance, move nothing.
_TIMES_AS_OFTEN = 2.0
_MIN_MORE = 20


@dataclass(frozen=True, slots=True)
class Choice:
    added: tuple[Signature, ...] = ()
    retired: tuple[Signature, ...] = ()


def choose(
    held: Collection[Signature],
    *,
    configured: Sequence[Signature],
    seen: Sequence[Signature],
    uses: Mapping[Signature, float],
    busy: Container[Signature] = (),
    limit: int = MAX_SIGNATURES,
) -> Choice:
    """What to add to those that have a place (`held`), and who goes for it: the least used of those that the
    configuration does not name.

    `configured` come first, in their order, whatever was used; then those `seen` in traffic, the most used first.
    `uses` are executions of late that each runs, or would run. Who is `busy` (it is being made) keeps its place.
    """
    configured = configured[:limit]
    fixed = frozenset(configured)
    num_free = limit - len(held)
    leaving = sorted((one for one in held if one not in fixed and one not in busy), key=lambda one: -uses.get(one, 0.0))
    retired = [leaving.pop() for _ in range(min(-num_free, len(leaving)))]
    num_free = max(0, num_free)
    added: list[Signature] = []
    for one in configured:
        if one in held:
            continue
        if num_free:
            num_free -= 1
        elif leaving:
            retired.append(leaving.pop())
        else:
            break
        added.append(one)
    for one in sorted(seen, key=lambda one: -uses.get(one, 0.0)):
        if one in held or one in fixed:
            continue
        if num_free:
            num_free -= 1
        elif leaving and _deserves(uses.get(one, 0.0), uses.get(leaving[-1], 0.0)):
            retired.append(leaving.pop())
        else:
            break
        added.append(one)
    return Choice(tuple(added), tuple(retired))


def _deserves(newcomer: float, least: float) -> bool:
    return newcomer >= max(_TIMES_AS_OFTEN * least, least + _MIN_MORE)
