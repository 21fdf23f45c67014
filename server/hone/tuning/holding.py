"""What operators hold back (paused, cancelled, rolled back, pinned), kept over restarts beside the kernels cache.

One small file for each held load of a model version, so that a hold ends with the graph that it was meant for.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from hone.kernels import digest_of
from hone.kernels.files import FOLDER_MODE, open_private, reason_of, replace_file
from hone.specialization import VersionRef

_log = logging.getLogger(__name__)

#: Why a version is held: nothing is tuned or promoted until somebody starts it again.
PAUSED, CANCELLED = "paused", "cancelled"
PINNED, ROLLED_BACK = "pinned to the baseline", "rolled back on request"
#: By action.
HOLDS = {"pause": PAUSED, "cancel": CANCELLED, "roll_back": ROLLED_BACK, "pin_baseline": PINNED}
#: These leave serving what serves; the others return it to the baseline.
KEEPING = frozenset({PAUSED, CANCELLED})

_MAX_BYTES = 1 << 14


def held_then(held: str, action: str) -> str:
    """What a version that is `held` already (empty: it is not) is held for after another action that holds.

    Whoever returned it to the baseline is not overruled by who only wants no more work on it.
    """
    then = HOLDS[action]
    return held if held and held not in KEEPING and then in KEEPING else then


class OperatorHolds:
    """Belongs to the tuner's thread. What cannot be written holds in this process, and a warning says so."""

    def __init__(self, folder: Path | None) -> None:
        """Without a folder nothing is kept."""
        self._folder = folder

    def get(self, ref: VersionRef) -> str:
        """Why the version is held; empty where it is not. A file that cannot be read holds nothing, and is told of."""
        if self._folder is None:
            return ""
        path = self._path(self._folder, ref)
        try:
            with open_private(path) as file:
                told = json.loads(file.read(_MAX_BYTES))
            held = told["held"]
            if held not in HOLDS.values():
                raise ValueError(f"expected 'held' to be one of {sorted(HOLDS.values())}, found {held!r}")
        except FileNotFoundError:
            return ""
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as problem:
            _log.warning("%s %s: what it was held for cannot be read from %s: %s", *ref[:2], path, problem)
            return ""
        return str(held)

    def put(self, ref: VersionRef, held: str) -> None:
        if self._folder is None:
            return
        told = {**ref._asdict(), "held": held}
        try:
            self._folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
            replace_file(self._path(self._folder, ref), f"{json.dumps(told, indent=2)}\n".encode())
        except OSError as problem:
            _log.warning(
                "%s %s is %s, which will not be remembered over a restart: %s", *ref[:2], held, reason_of(problem)
            )

    def drop(self, ref: VersionRef) -> None:
        if self._folder is None:
            return
        try:
            self._path(self._folder, ref).unlink(missing_ok=True)
        except OSError as problem:
            _log.warning("%s %s will be held again after a restart: %s", *ref[:2], reason_of(problem))

    @staticmethod
    def _path(folder: Path, ref: VersionRef) -> Path:
        return folder / f"{digest_of(ref._asdict())}.json"
