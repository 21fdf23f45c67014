// All models at a glance: one row each, which stays the same element while it changes.

import { badge, bar, el, memo, scroller, setAttribute, setChildren, setText } from "./dom.js";
import { count, duration, plural, rate, times } from "./format.js";
import { engineOf, latencyNow, lineOf, newest, speedups } from "./store.js";

const HEADS = ["Model", "State", "Tuning", "Answers now", "Speed-up", "p50", "p99", "Requests/s", "Errors/s"];
const NUMBERS = new Set(["Speed-up", "p50", "p99", "Requests/s", "Errors/s"]);

export class ModelsView {
  constructor() {
    this.rows = new Map();
    this.wanted = "";
    this.filter = el("input", { type: "search", placeholder: "Filter by name", "aria-label": "Filter models by name", oninput: () => {
      this.wanted = this.filter.value.trim().toLowerCase();
      if (this.store) this.update(this.store);
    } });
    this.summary = el("div", { class: "tiles" });
    this.body = el("tbody");
    this.nothing = el("p", { class: "empty" });
    this.table = scroller("Models of the repository", el("table", { class: "models" },
      el("caption", { class: "hidden" }, "Models of the repository"),
      el("thead", {}, el("tr", {}, HEADS.map((head) => el("th", { scope: "col", class: NUMBERS.has(head) ? "number" : null }, head)))),
      this.body));
    this.node = el("div", {}, el("h1", { class: "hidden" }, "Models"), this.summary,
      el("div", { class: "above" }, el("h2", {}, "Models"), this.filter), this.table, this.nothing);
    // What stands between backticks is code.
    this.drawNothing = memo((text) => this.nothing.replaceChildren(...text.split("`").map((part, index) => (index % 2 ? el("code", { class: "whole" }, part) : part))));
    this.drawSummary = memo((tiles) => this.summary.replaceChildren(...tiles.map(([name, value, hint]) =>
      el("div", { class: "tile" }, el("span", { class: "name" }, name), el("span", { class: "value" }, value), el("span", { class: "hint" }, hint)))));
  }

  update(store) {
    this.store = store;
    this.drawSummary(summary(store));
    const names = [...store.models.keys()].sort().filter((name) => name.toLowerCase().includes(this.wanted));
    for (const name of [...this.rows.keys()]) if (!store.models.has(name)) this.rows.delete(name);
    setChildren(this.body, names.map((name) => {
      if (!this.rows.has(name)) this.rows.set(name, new Row(name));
      const row = this.rows.get(name);
      row.update(store.models.get(name));
      return row.node;
    }));
    this.table.hidden = !names.length;
    this.drawNothing(names.length ? "" : emptiness(store, this.wanted));
  }
}

function emptiness(store, wanted) {
  if (wanted && store.models.size) return `No model's name contains “${wanted}”.`;
  if (store.locked["model-repository"] && store.locked.statistics) return "Models are behind a key: use “Keys needed” above.";
  return "No models yet. Put a folder `MODEL/1/model.onnx` into the repository: with `--model-control-mode=poll` it appears here by itself.";
}

function summary(store) {
  const all = [...store.models.values()];
  const versions = all.map((parts) => [parts.stats?.[newest(parts)], parts.tuning?.[newest(parts)]]);
  const ready = all.filter((parts) => lineOf(parts, newest(parts))?.state === "READY").length;
  const tuned = versions.filter(([, tuning]) => speedups(tuning).length).length;
  const working = versions.filter(([, tuning]) => tuning?.state === "tuning").length;
  const total = (field) => versions.reduce((sum, [stats]) => sum + (stats?.[field] ?? 0), 0);
  const ups = versions.flatMap(([, tuning]) => speedups(tuning));
  const tuner = store.server.tuner;
  return [
    ["Models ready", `${count(ready)} of ${count(all.length)}`, store.server.control_mode ? `control mode ${store.server.control_mode}` : ""],
    ["Answered tuned", count(tuned), ups.length ? `geometric mean ${times(Math.exp(ups.reduce((sum, up) => sum + Math.log(up), 0) / ups.length))}` : "none yet"],
    ["Being tuned", count(working), tuner ? plural(tuner.num_queued, "job waits", "jobs wait") : "tuning is off"],
    ["Requests/s", rate(total("requests_per_second")), `${rate(total("errors_per_second"))} errors/s`],
    ["Candidates", tuner ? count(tuner.candidates_measured) : "–", tuner ? `measured; ${count(tuner.candidates_built)} built, ${count(tuner.candidates_failed)} failed` : ""],
    ["Swaps", tuner ? count(tuner.num_promotions) : "–", tuner ? `${plural(tuner.num_rollbacks, "roll-back")}, ${count(tuner.num_quarantines)} kept out` : ""],
  ];
}

class Row {
  constructor(name) {
    this.cells = HEADS.slice(1).map((head) => el("td", { class: NUMBERS.has(head) ? "number" : null, "data-head": head }));
    this.link = el("a", { href: `#/models/${encodeURIComponent(name)}` }, name);
    this.version = el("span", { class: "hint" });
    this.node = el("tr", {}, el("th", { scope: "row" }, this.link, " ", this.version), this.cells);
    this.draws = this.cells.map((cell) => memo((content) => cell.replaceChildren(...[content].flat().map(make))));
  }

  update(parts) {
    const version = newest(parts);
    const stats = parts.stats?.[version];
    const tuning = parts.tuning?.[version];
    const line = lineOf(parts, version);
    const state = line?.state || (stats ? "READY" : "not loaded");
    const engine = engineOf(tuning, stats);
    const now = latencyNow(stats);
    const ups = speedups(tuning);
    setText(this.version, version ? `v${version}` : "");
    setAttribute(this.node, "title", line?.reason || null);
    [
      [{ badge: state }],
      tuning ? [{ badge: tuning.state }, ...(tuning.state === "tuning" ? [{ bar: Math.round(tuning.progress * 100) / 100 }] : [])] : "–",
      [{ badge: engine.text, kind: engine.kind }],
      ups.length ? `${times(Math.max(...ups))}` : "–",
      now ? duration(now.p50) : "–",
      now ? duration(now.p99) : "–",
      stats ? rate(stats.requests_per_second) : "–",
      stats ? rate(stats.errors_per_second) : "–",
    ].forEach((content, index) => this.draws[index](content));
  }
}

function make(part) {
  if (typeof part === "string") return part;
  return part.badge ? badge(part.badge, (part.kind ?? part.badge).replace(" ", "-")) : bar(part.bar, "progress");
}
