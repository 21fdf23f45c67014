"""What every kind of test shares."""

from __future__ import annotations

import os
import signal

# Tests that use onnxruntime without hone's engine must not report to its maker either.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# A shell that runs the suite in the background has it ignore Ctrl-C, and every process that tests start inherits that;
# some tests send exactly that signal.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
