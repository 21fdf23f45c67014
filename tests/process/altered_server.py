"""`python altered_server.py ALTERATIONS SERVE-ARGUMENTS`: a server whose tuning has other children, or less patience.

ALTERATIONS is a JSON object: `command` is what starts a child, `watch` are fields of WatchOptions.
"""

from __future__ import annotations

import json
import sys
from functools import partial

from hone.cli.main import main
from hone.tuning import assembly
from hone.tuning.options import TunerOptions
from hone.tuning.watch import Watch, WatchOptions

if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    if "command" in told:
        assembly.TunerOptions = partial(TunerOptions, command=tuple(told["command"]))
    if "watch" in told:
        assembly.Watch = partial(Watch, options=WatchOptions(**told["watch"]))
    sys.exit(main(sys.argv[2:]))
