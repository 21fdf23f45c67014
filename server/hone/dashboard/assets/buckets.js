// What the gate measured for each signature: times, speed-up as a bar, difference against what is allowed.

import { badge, bar, el, table } from "./dom.js";
import { milliseconds, small, times } from "./format.js";

const HEADS = ["Signature", "Answers now", { name: "Baseline", number: true }, { name: "Tuned", number: true }, "Speed-up", "Difference, of what is allowed", "Verdict"];

export function drawBuckets(place, buckets, key) {
  if (!buckets.length) {
    place.replaceChildren(el("p", { class: "empty" }, key ? `This is behind a key (header ${key}).` : "No signature has been looked at yet."));
    return;
  }
  const most = Math.max(1.25, ...buckets.map((bucket) => bucket.speedup ?? 0));
  place.replaceChildren(table("Speed-up by signature", HEADS, buckets.map((bucket) => row(bucket, most)), "buckets"),
    el("p", { class: "hint" }, "The mark in each bar is the baseline’s speed (1×). A signature is promoted from 1.03× on, when that is certain."));
}

function row(bucket, most) {
  const isTuned = bucket.engine === "tvm";
  return el("tr", {},
    el("th", { scope: "row" }, el("code", {}, bucket.signature)),
    el("td", {}, badge(isTuned ? `tuned, generation ${bucket.generation}` : "ONNX Runtime", isTuned ? "tuned" : "baseline")),
    el("td", { class: "number" }, milliseconds(bucket.baseline_ms)),
    el("td", { class: "number" }, milliseconds(bucket.tuned_ms)),
    el("td", {}, bucket.speedup ? el("span", { class: "with-bar" }, speedupBar(bucket.speedup, most, isTuned), times(bucket.speedup)) : "–"),
    el("td", {}, bucket.max_error === null ? "–" : difference(bucket)),
    el("td", {}, verdict(bucket)));
}

function speedupBar(speedup, most, isTuned) {
  const node = bar(speedup / most, isTuned ? "tuned" : "baseline");
  const mark = el("span", { class: "mark" });
  mark.style.left = `${(1 / most) * 100}%`;
  node.append(mark);
  return node;
}

/** On a logarithmic scale of six decades below what is allowed: a millionth of it is an empty bar. */
function difference({ max_error: error, tolerance }) {
  if (!tolerance) return error === 0 ? "equal" : small(error);
  const share = error <= 0 ? 0 : 1 + Math.log10(error / tolerance) / 6;
  return el("span", { class: "with-bar" }, bar(share, error > tolerance ? "bad" : "good"), `${small(error)} of ${small(tolerance)}`);
}

function verdict(bucket) {
  const parts = [badge(bucket.outcome || "not yet", bucket.outcome || "queued")];
  if (bucket.provisional) parts.push(" ", badge("to be measured again", "provisional"));
  if (bucket.reason) parts.push(el("span", { class: "hint why" }, bucket.reason));
  return parts;
}
