// What happened to a model, newest first, with the reason of everything that was refused, rolled back or kept out.

import { badge, el, table } from "./dom.js";
import { milliseconds, small, times } from "./format.js";

const KINDS = { promoted: "tuned", passed: "passed", refused: "refused", failed: "failed", child_failed: "failed", rolled_back: "rolled_back", retired: "rolled_back", quarantined: "failed", unsupported: "unsupported" };
const SWAPS = { promoted: "promoted", rolled_back: "rolled-back", retired: "rolled-back", quarantined: "rolled-back" };

export function drawHistory(place, history, key) {
  if (!history.length) {
    place.replaceChildren(el("p", { class: "empty" }, key ? `This is behind a key (header ${key}).` : "Nothing has happened yet."));
    return;
  }
  place.replaceChildren(table("Events, the newest first", ["When", "What", "Signature", "Why and how much"], [...history].reverse().map((line) =>
    el("tr", {},
      el("td", {}, el("time", { datetime: line.at }, new Date(line.at).toLocaleString("en-GB"))),
      el("td", {}, badge(line.event.replaceAll("_", " "), KINDS[line.event] ?? "queued")),
      el("td", {}, line.signature ? el("code", {}, line.signature) : "–"),
      el("td", {}, told(line)))), "history"));
}

function told(line) {
  const parts = [];
  if (line.generation) parts.push(`generation ${line.generation}`);
  if (line.speedup) parts.push(`${times(line.speedup)} as fast`);
  if (line.baseline_ms && line.tuned_ms) parts.push(`${milliseconds(line.baseline_ms)} → ${milliseconds(line.tuned_ms)}`);
  if (line.max_error !== undefined) parts.push(`difference ${small(line.max_error)}`);
  if (line.reason) parts.push(line.reason);
  return parts.join("; ") || "–";
}

/** Swaps for the chart; those of one second are one marker. */
export function markersOf(history) {
  const found = new Map();
  for (const line of history) {
    const kind = SWAPS[line.event];
    if (!kind) continue;
    const t = Date.parse(line.at) / 1000;
    const key = `${t} ${kind}`;
    found.set(key, { t, kind, generations: [...(found.get(key)?.generations ?? []), line.generation].filter(Boolean) });
  }
  return [...found.values()].map(({ t, kind, generations }) => ({
    t,
    kind,
    text: `${kind === "promoted" ? "swap" : "back"}${generations.length ? ` to ${span(generations)}` : ""}`.replace("back to", "back from"),
  }));
}

function span(generations) {
  const low = Math.min(...generations);
  const high = Math.max(...generations);
  return low === high ? `${low}` : `${low}–${high}`;
}
