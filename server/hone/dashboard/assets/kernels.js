// The kernel map: where the time of a tuned module goes. Measured when asked for, in a process of its own on the server.

import { call } from "./api.js";
import { badge, bar, el, setAttribute, setText, table } from "./dom.js";
import { duration, percent, rate, times, trim } from "./format.js";

const HEADS = ["Group (operator and what is fused behind it)", "Template and parameters", "Layout", { name: "Time", number: true }, "Share", { name: "GFLOP/s", number: true }, "Of the machine’s limit"];
const KNOWN_HEADS = ["Group (operator and what is fused behind it)", "Template and parameters", { name: "Calls", number: true }, { name: "Time", number: true }, "Share", { name: "GFLOP/s", number: true }, "Of the machine’s limit"];

export class KernelMap {
  constructor(name) {
    this.name = name;
    this.batch = 1;
    this.asked = "";
    this.batches = el("select", { onchange: () => {
      this.batch = Number(this.batches.value);
      this.retry();
    } });
    this.button = el("button", { type: "button", id: "profile-kernels", onclick: () => this.measure() }, "Profile kernels");
    this.outcome = el("p", { class: "outcome", role: "status" });
    this.place = el("div");
    this.node = el("div", {}, el("div", { class: "choices" }, el("label", {}, "Batch ", this.batches), this.button), this.outcome, this.place);
  }

  update(tuning, store) {
    const batches = [...new Set((tuning?.buckets ?? []).map((bucket) => Number(/\[(\d+)/.exec(bucket.signature)?.[1] ?? 1)))].sort((a, b) => a - b);
    const wanted = batches.length ? batches : [1];
    if (wanted.join() !== this.wanted) {
      this.wanted = wanted.join();
      if (!wanted.includes(this.batch)) [this.batch] = wanted;
      this.batches.replaceChildren(...wanted.map((batch) => el("option", { value: batch, selected: batch === this.batch }, String(batch))));
    }
    const isTuned = (tuning?.buckets ?? []).some((bucket) => bucket.engine === "tvm");
    setAttribute(this.button, "disabled", tuning && !this.isBusy ? null : "");
    // Whatever is served now may have been explained before.
    const key = JSON.stringify([this.batch, (tuning?.buckets ?? []).map((bucket) => bucket.generation), Object.keys(store.locked)]);
    if (tuning && key !== this.asked) {
      this.asked = key;
      this.recall(isTuned);
    }
  }

  retry() {
    this.asked = "";
  }

  get path() {
    return `/dashboard/explain/${encodeURIComponent(this.name)}?batch=${this.batch}`;
  }

  async recall(isTuned) {
    try {
      const found = await call("GET", this.path);
      const known = found ? null : await call("GET", `/dashboard/kernels/${encodeURIComponent(this.name)}?batch=${this.batch}`);
      if (found) this.draw(found);
      else if (known) this.drawKnown(known);
      else {
        this.place.replaceChildren(el("p", { class: "empty" }, isTuned
          ? "Nothing tuned serves this batch size now, or it keeps no map. Profiling takes some seconds, beside serving, at idle priority."
          : "Nothing tuned serves now. Profiling compiles it with what is decided so far."));
      }
    } catch (problem) {
      this.place.replaceChildren(el("p", { class: "empty" }, problem.message));
    }
  }

  async measure() {
    this.isBusy = true;
    setAttribute(this.button, "disabled", "");
    setAttribute(this.outcome, "class", "outcome");
    setText(this.outcome, "Profiling: compiling and timing every call");
    try {
      this.draw(await call("POST", this.path));
      setText(this.outcome, "");
    } catch (problem) {
      setAttribute(this.outcome, "class", "outcome failed");
      setText(this.outcome, problem.message);
    } finally {
      this.isBusy = false;
      setAttribute(this.button, "disabled", null);
    }
  }

  /** What tuning kept: each kernel as its search timed it alone. */
  drawKnown(told) {
    this.place.replaceChildren(...known(told));
  }

  /** What was profiled for CPUs, and what is kept for GPUs. */
  draw(told) {
    const gpus = (told.gpus ?? []).flatMap(known);
    const profiled = told.unsupported ? [el("p", { class: "empty" }, `The compiler does not take it: ${told.unsupported}`)]
      : told.tuned ? this.profiled(told) : [];
    this.place.replaceChildren(...profiled, ...gpus);
  }

  profiled({ signature, precision, tuned, baseline, roofline, layers }) {
    return [
      el("p", {}, `${signature} at ${precision}: ${duration(tuned.microseconds)} tuned, ${duration(baseline.microseconds)} on ONNX Runtime. `,
        el("span", { class: "hint" }, `Limit of this machine ${Math.round(roofline.gflops)} GFLOP/s on ${roofline.num_threads} threads; ${duration(tuned.overhead_microseconds)} between calls.`)),
      strip(tuned.groups),
      table("Calls of the tuned module in the order of execution", HEADS, tuned.groups.map(row), "kernels"),
      el("h3", {}, "The same work on both sides"),
      table("Layers against the baseline", ["Layer", { name: "Tuned", number: true }, { name: "ONNX Runtime", number: true }, "Ratio"], layers.map(layer), "layers"),
    ];
  }
}

/** A module out of its artifact. */
function known(told) {
  const timed = told.groups.filter((group) => group.share !== null);
  const parts = told.rest_share > 0.001 ? [...timed, { what: "functions that were not measured, and between calls", share: told.rest_share }] : timed;
  const where = told.gpu ? ` on ${told.device ?? "a GPU"}` : "";
  const state = told.serves === false ? " It is kept, and does not serve here." : "";
  return [
    el("p", {}, `What tuning knows, ${told.precision} precision${where}: ${timed.length
      ? `what was measured one by one takes ${duration(told.measured_us)} together` : "generated functions alone"}`,
      told.tuned_us ? `, the whole module ${duration(told.tuned_us)}.` : ".", `${state} `,
      el("span", { class: "hint" }, told.gpu ? "Times are those of the search on that GPU; nothing is run for this."
        : "“Profile kernels” times every call in its place, beside the baseline’s.")),
    strip(parts),
    table("Kernels and functions of the tuned module", KNOWN_HEADS, told.groups.map(knownRow), "kernels"),
  ];
}

/** All calls side by side, as wide as they take long. */
function strip(groups) {
  return el("div", { class: "strip", role: "img", "aria-label": "Shares of time of the calls; the table below has the numbers" }, groups.map((group, index) => {
    const part = el("span", { class: `part part${index % 6}`, title: `${group.what}: ${percent(group.share)}` }, group.share > 0.06 ? percent(group.share) : "");
    part.style.flexGrow = String(Math.max(group.share, 0.002));
    return part;
  }));
}

function row(group, index) {
  const parameters = Object.entries(group.parameters ?? {}).map(([name, value]) => `${name}=${value}`).join(" ");
  return el("tr", {},
    el("th", { scope: "row" }, el("span", { class: `key part${index % 6}`, "aria-hidden": "true" }), el("code", {}, group.what)),
    el("td", {}, badge(group.template || "generated", "queued"), parameters ? el("code", { class: "parameters" }, parameters) : ""),
    el("td", {}, group.layout || "–"),
    el("td", { class: "number" }, duration(group.microseconds)),
    el("td", {}, el("span", { class: "with-bar" }, bar(group.share, "tuned"), percent(group.share))),
    el("td", { class: "number" }, group.gflops ? rate(group.gflops) : "–"),
    el("td", {}, group.of_roofline === null ? "–" : el("span", { class: "with-bar" }, bar(group.of_roofline, "good"), percent(group.of_roofline))));
}

function knownRow(group) {
  const parameters = Object.entries(group.parameters ?? {}).map(([name, value]) => `${name}=${value}`).join(" ");
  return el("tr", {},
    el("th", { scope: "row" }, el("code", {}, group.what), group.note ? el("div", { class: "hint" }, group.note) : ""),
    el("td", {}, badge(group.template || "generated", "queued"), parameters ? el("code", { class: "parameters" }, parameters) : ""),
    el("td", { class: "number" }, String(group.num_calls)),
    el("td", { class: "number" }, group.microseconds === null ? "–" : duration(group.microseconds)),
    el("td", {}, group.share === null ? "–" : el("span", { class: "with-bar" }, bar(group.share, "tuned"), percent(group.share))),
    el("td", { class: "number" }, group.gflops ? rate(group.gflops) : "–"),
    el("td", {}, group.of_roofline === null ? "–" : el("span", { class: "with-bar" }, bar(group.of_roofline, "good"), percent(group.of_roofline))));
}

function layer(one) {
  const ratio = one.tuned_us > 0 ? one.baseline_us / one.tuned_us : null;
  return el("tr", {},
    el("th", { scope: "row" }, el("code", {}, one.what)),
    el("td", { class: "number" }, duration(one.tuned_us)),
    el("td", { class: "number" }, duration(one.baseline_us)),
    el("td", {}, ratio === null || !one.baseline_us ? "–" : times(Number(trim(ratio))), one.lost ? [" ", badge("slower", "refused")] : ""));
}
