"""Classify digits with NVIDIA's tritonclient, before and after tuning, and plot both latencies.

    .venv/bin/hone serve --model-control-mode poll      # or: make serve
    .venv/bin/python examples/digits_latency.py         # in a second terminal; --help tells the options

The cells (`# %%`) run one by one in an editor that knows them. Nothing here is particular to hone but the tuning
endpoint: `infer` is what any Triton client does, and it does not change when the engine does.
"""

# %% What is measured
from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.http as triton
from numpy.typing import NDArray
from PIL import Image

parser = argparse.ArgumentParser(description="Latency of the model digits, before and after tuning.")
parser.add_argument("--url", default="127.0.0.1:8000", help="host:port of the server's HTTP")
parser.add_argument("--requests", type=int, default=1000, help="how many to time on each engine")
parser.add_argument("--wait", type=float, default=600.0, help="seconds to wait for tuning")
parser.add_argument("--plot", type=Path, default=Path("digits_latency.svg"), help="where to write the picture")
options = parser.parse_args()

MODEL = "digits"
PICTURES = sorted((Path(__file__).parent / "digits").glob("*.png"))


# %% The server's side of tuning: state, and actions
def tuning(action: str = "") -> dict[str, Any]:
    """Status of the model's tuning, after an action if one is given (docs/tuning.md)."""
    body = json.dumps({"action": action}).encode() if action else None
    headers = {"Content-Type": "application/json"} if action else {}
    request = urllib.request.Request(f"http://{options.url}/v2/models/{MODEL}/tuning", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        told: dict[str, Any] = json.load(answer)
    return told


def num_tuned(status: dict[str, Any]) -> int:
    return sum(bucket["engine"] == "tvm" for bucket in status["buckets"])


def wait_for_tuning() -> dict[str, Any]:
    until = time.monotonic() + options.wait
    while (status := tuning())["state"] in ("queued", "tuning"):
        print(f"\r{status['progress']:6.1%}  {status['reason'][:60]:<60}", end="", file=sys.stderr, flush=True)
        if time.monotonic() > until:
            sys.exit(f"\ntuning has not ended within {options.wait:g} s")
        time.sleep(0.5)
    print(f"\r{'':<70}\r", end="", file=sys.stderr)
    return status


# %% A client as for any Triton server
client = triton.InferenceServerClient(options.url)
labels = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def read_picture(path: Path) -> NDArray[np.float32]:
    """8x8 grey values from 0 to 1, as a batch of one."""
    picture = Image.open(path).convert("L").resize((8, 8), Image.Resampling.BOX)
    return (np.asarray(picture, dtype=np.float32) / 255.0)[np.newaxis, np.newaxis]


def classify(image: NDArray[np.float32]) -> NDArray[np.float32]:
    """Probabilities of the ten digits."""
    tensor = triton.InferInput("image", list(image.shape), "FP32")
    tensor.set_data_from_numpy(image)
    answer = client.infer(MODEL, [tensor], outputs=[triton.InferRequestedOutput("probabilities")])
    probabilities: NDArray[np.float32] = answer.as_numpy("probabilities")[0]
    return probabilities


def measure(images: list[NDArray[np.float32]]) -> NDArray[np.float64]:
    """Milliseconds that each request took, as a client sees them: with encoding, loopback and decoding."""
    for image in images:
        classify(image)
    times = np.empty(options.requests)
    for number in range(options.requests):
        began = time.perf_counter()
        classify(images[number % len(images)])
        times[number] = time.perf_counter() - began
    return times * 1e3


images = [read_picture(path) for path in PICTURES]
try:
    client.is_model_ready(MODEL)
except OSError as problem:
    sys.exit(f"no server at {options.url}: {problem}; start one with 'hone serve'")

# %% Before: the baseline, whatever was tuned already
tuning("pin_baseline")
before_answers = [classify(image) for image in images]
before = measure(images)
print(f"before  p50 {np.median(before):.3f} ms  p99 {np.percentile(before, 99):.3f} ms")

# %% Tune (or promote what the kernels cache remembers), and measure again
tuning("start")
status = wait_for_tuning()
after_answers = [classify(image) for image in images]
after = measure(images)
print(f"after   p50 {np.median(after):.3f} ms  p99 {np.percentile(after, 99):.3f} ms")

# %% The answers are the same
print("\npicture        before    after   largest difference")
for path, old, new in zip(PICTURES, before_answers, after_answers, strict=True):
    print(f"{path.stem:<14} {labels[old.argmax()]:<9} {labels[new.argmax()]:<9} {np.abs(old - new).max():.1e}")
if num_tuned(status):
    for bucket in status["buckets"]:
        if bucket["engine"] == "tvm":
            print(f"{bucket['signature']}: the model alone is {bucket['speedup']:.2f} times as fast")
else:
    print(f"\nnothing was promoted, so both columns are the baseline: {status['reason']}")


# %% Plot: the share of requests that were answered within a time
def plot(series: dict[str, NDArray[np.float64]], path: Path) -> None:
    """An SVG of the cumulative distributions, cut at the 99th percentile of the slowest."""
    width, height, left, bottom, top = 720, 420, 70, 60, 40
    least = min(float(times.min()) for times in series.values())
    most = max(float(np.percentile(times, 99)) for times in series.values())
    span = max(most - least, 1e-9)

    def x(milliseconds: float) -> float:
        return left + (milliseconds - least) / span * (width - left - 30)

    def y(share: float) -> float:
        return height - bottom - share * (height - bottom - top)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        "<style>text { font-size: 13px }</style>",
        f"<title>Latency of {MODEL} before and after tuning</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="22">{MODEL}: share of {options.requests} requests answered within a time</text>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        lines.append(f'<path d="M{left} {y(share):.1f}H{width - 30}" stroke="#ddd"/>')
        lines.append(f'<text x="{left - 8}" y="{y(share) + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    for step in range(6):
        value = least + span * step / 5
        lines.append(f'<text x="{x(value):.1f}" y="{height - bottom + 22}" text-anchor="middle">{value:.2f}</text>')
    lines.append(f'<text x="{(left + width) / 2:.0f}" y="{height - 14}" text-anchor="middle">milliseconds</text>')
    for number, (name, times) in enumerate(series.items()):
        color = ("#c2410c", "#1d4ed8")[number]
        ordered = np.sort(times)
        shares = np.arange(1, len(ordered) + 1) / len(ordered)
        points = [f"{x(t):.1f},{y(s):.1f}" for t, s in zip(ordered, shares, strict=True) if t <= most]
        lines.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{color}" stroke-width="2"/>')
        at = y(0.25) + 22 * number
        lines.append(f'<path d="M{width - 320} {at - 4:.0f}h24" stroke="{color}" stroke-width="3"/>')
        text = f"{name}: median {np.median(times):.3f} ms"
        lines.append(f'<text x="{width - 288}" y="{at:.0f}">{text}</text>')
    path.write_text("\n".join([*lines, "</svg>"]) + "\n", encoding="utf-8")


plot({"before (ONNX Runtime)": before, "after (tuned)": after}, options.plot)
print(f"\nplotted into {options.plot}")
