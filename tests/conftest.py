"""What every kind of test shares."""

from __future__ import annotations

import os

# Tests that use onnxruntime without hone's engine must not report to its maker either.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
