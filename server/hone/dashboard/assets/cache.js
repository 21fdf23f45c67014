// The kernels cache: what is in it, how often it helped, what several models share.

import { call } from "./api.js";
import { el, memo, setText, table } from "./dom.js";
import { bytes, count, percent } from "./format.js";

export class CacheView {
  constructor(store) {
    this.live = el("div");
    this.place = el("div", {}, el("p", { class: "empty" }, "Looking into the folder."));
    this.outcome = el("p", { class: "outcome failed", role: "status" });
    this.node = el("article", {},
      el("div", { class: "above" }, el("h1", {}, "Kernels cache"), el("button", { type: "button", onclick: () => this.load() }, "Look again")),
      this.outcome,
      el("section", { class: "card" }, el("h2", {}, "Asked by the server since it started"), this.live,
        el("p", { class: "hint" }, "The processes that tune ask for themselves, and publish what they make: see the entries below.")),
      this.place);
    this.drawLive = memo((cache) => this.live.replaceChildren(cache ? live(cache) : el("p", { class: "empty" }, "Tuning is off: the cache is not used.")));
    this.load();
  }

  update(store) {
    this.drawLive(store.server.cache ?? null);
  }

  retry() {
    this.load();
  }

  async load() {
    setText(this.outcome, "");
    try {
      this.place.replaceChildren(...draw(await call("GET", "/dashboard/cache")));
    } catch (problem) {
      setText(this.outcome, problem.message);
      this.place.replaceChildren();
    }
  }
}

function live(cache) {
  const kinds = [...new Set([cache.hits, cache.misses, cache.evictions].flatMap((counts) => Object.keys(counts)))].sort();
  if (!kinds.length) return el("p", { class: "empty" }, "Nothing has been asked of it yet.");
  const number = (name) => ({ name, number: true });
  return table("Use of the cache", ["Kind", number("Found"), number("Not found"), number("Hit rate"), number("Evicted")], kinds.map((kind) => {
    const hits = cache.hits[kind] ?? 0;
    const misses = cache.misses[kind] ?? 0;
    return el("tr", {}, el("th", { scope: "row" }, kind), cells([count(hits), count(misses), hits + misses ? percent(hits / (hits + misses)) : "–", count(cache.evictions[kind] ?? 0)]));
  }));
}

function cells(values) {
  return values.map((value) => el("td", { class: "number" }, value));
}

function draw(told) {
  if (!told.exists) return [el("p", { class: "empty" }, told.problem ?? `There is no cache in ${told.path} yet: the first tuning makes it.`)];
  return [
    el("section", { class: "card" }, el("h2", {}, "In the folder"),
      el("p", { class: "hint" }, `${told.path}: ${count(told.num_entries)} entries, ${bytes(told.size_bytes)}`),
      table("Entries by kind", ["Kind", { name: "Entries", number: true }, { name: "Size", number: true }], Object.entries(told.kinds).sort().map(([kind, { num_entries, size_bytes }]) =>
        el("tr", {}, el("th", { scope: "row" }, kind), cells([count(num_entries), bytes(size_bytes)])))),
      el("p", { class: "hint" }, `Made on: ${Object.values(told.devices).map((name) => name ?? "unknown").join("; ") || "no device yet"}`)),
    el("section", { class: "card" }, el("h2", {}, "Shared between models"),
      el("p", {}, `${count(told.num_shared_kernels)} of ${count(told.num_used_kernels)} kernels in use are run by more than one model: built and measured once.`),
      told.shared.length ? table("Shared kernels", ["Kernel", "Computes", "Models"], told.shared.map((kernel) => el("tr", {},
        el("th", { scope: "row" }, el("code", {}, `${kernel.template ?? "kernel"} ${kernel.digest.slice(0, 10)}`)),
        el("td", {}, workload(kernel.workload)),
        el("td", {}, kernel.models.join(", "))))) : null),
    told.quarantined.length ? el("section", { class: "card" }, el("h2", {}, "Kept out"),
      table("Quarantined artifacts", ["Artifact", "Why"], told.quarantined.map((one) => el("tr", {},
        el("th", { scope: "row" }, el("code", {}, one.digest.slice(0, 16))), el("td", {}, one.reason))))) : "",
  ];
}

function workload(told) {
  if (!told) return "–";
  const shapes = (told.inputs ?? []).map((input) => (input.shape ?? input[1] ?? []).join("×")).filter(Boolean);
  return el("code", {}, [told.op, ...shapes].filter(Boolean).join(" "));
}
