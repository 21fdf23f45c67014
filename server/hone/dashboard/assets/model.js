// One model: what answers now, how fast, what tuning is at, and what was decided and why.

import { actionBar } from "./actions.js";
import { call } from "./api.js";
import { drawBuckets } from "./buckets.js";
import { LineChart } from "./charts.js";
import { badge, el, memo, setChildren, setText } from "./dom.js";
import { count, duration, plural, rate, seconds, small, times } from "./format.js";
import { drawHistory, markersOf } from "./history.js";
import { KernelMap } from "./kernels.js";
import { engineOf, latencyNow, lineOf, newest, speedups } from "./store.js";
import { TryIt } from "./tryit.js";

const NAMES = { onnxruntime: "ONNX Runtime", tvm: "tuned" };
const SPANS = [[60, "1 min"], [180, "3 min"], [600, "10 min"]];
const KINDS = [["request", "whole requests"], ["execution", "in the engine"]];

export class ModelView {
  constructor(name, store) {
    this.name = name;
    this.version = "";
    this.span = 180;
    this.kind = "request";
    this.heading = el("h1", {}, name);
    this.badges = el("span", { class: "badges" });
    this.versions = el("select", { "aria-label": "Version", onchange: () => {
      this.chosen = this.versions.value;
      this.update(this.store);
    } });
    this.reason = el("p", { class: "reason", hidden: true });
    this.tiles = el("div", { class: "tiles" });
    this.actions = actionBar(() => ({ name, version: this.version, store: this.store }));
    this.latency = new LineChart({ label: `Latency of ${name}`, format: duration, log: true });
    this.traffic = new LineChart({ label: `Requests and errors of ${name} per second`, format: (value) => `${rate(value)}/s`, height: 130 });
    this.progress = el("div");
    this.buckets = el("div");
    this.history = el("div");
    this.kernels = new KernelMap(name);
    this.tryIt = new TryIt(name);
    this.body = el("div", {},
      this.tiles,
      this.actions.node,
      section("Latency", "latency", el("div", { class: "choices" },
        choice("Measured", KINDS, this.kind, (value) => this.choose("kind", value)),
        choice("Last", SPANS, this.span, (value) => this.choose("span", Number(value)))),
      this.latency.node, this.traffic.node),
      section("Tuning", "tuning", this.progress),
      section("Speed-up by batch", "buckets", this.buckets),
      section("Kernel map", "kernels", this.kernels.node),
      section("Try it", "try", this.tryIt.node),
      section("History", "history", this.history));
    this.gone = el("p", { class: "empty", hidden: true });
    this.node = el("article", {}, el("p", { class: "crumbs" }, el("a", { href: "#/" }, "Models"), " / ", name),
      el("div", { class: "above" }, this.heading, this.badges, this.versions), this.reason, this.gone, this.body);
    this.draws = {
      badges: memo((state, tuning, engine) => setChildren(this.badges, [badge(state, state.replace(" ", "-")),
        tuning ? badge(tuning) : null, badge(`answers: ${engine.text}`, engine.kind)].filter(Boolean))),
      versions: memo((all, version) => {
        this.versions.replaceChildren(...all.map((one) => el("option", { value: one, selected: one === version }, `version ${one}`)));
        this.versions.hidden = all.length < 2;
      }),
      tiles: memo((tiles) => this.tiles.replaceChildren(...tiles.map(([title, value, hint]) =>
        el("div", { class: "tile" }, el("span", { class: "name" }, title), el("span", { class: "value" }, value), el("span", { class: "hint" }, hint))))),
      progress: memo((...told) => this.progress.replaceChildren(...progress(...told))),
      buckets: memo((found, key) => drawBuckets(this.buckets, found, key)),
      history: memo((found, key) => drawHistory(this.history, found, key)),
    };
    this.loadEarlier(store);
  }

  async loadEarlier(store) {
    try {
      store.addEarlier(this.name, await call("GET", `/dashboard/points/${encodeURIComponent(this.name)}`));
    } catch (problem) {
      this.latency.note = problem.message; // behind a key: the chart then begins with this page
    }
  }

  retry() {
    if (this.store) this.loadEarlier(this.store);
    this.kernels.retry();
    this.tryIt.retry();
  }

  close() {
    this.tryIt.close();
  }

  choose(field, value) {
    this[field] = value;
    this.update(this.store);
  }

  update(store) {
    this.store = store;
    const parts = store.models.get(this.name);
    this.body.hidden = !parts;
    this.gone.hidden = Boolean(parts);
    if (!parts) {
      setText(this.gone, `There is no model “${this.name}” in the repository now. It appears here when it comes back.`);
      return;
    }
    const all = Object.keys(parts.stats ?? parts.tuning ?? {}).sort((a, b) => Number(b) - Number(a));
    this.version = this.chosen && all.includes(this.chosen) ? this.chosen : newest(parts);
    const version = this.version;
    const stats = parts.stats?.[version];
    const tuning = parts.tuning?.[version];
    const history = parts.history?.[version] ?? [];
    const line = lineOf(parts, version);
    const state = line?.state || (stats ? "READY" : "not loaded");
    this.draws.badges(state, tuning?.state ?? null, engineOf(tuning, stats));
    this.draws.versions(all, version);
    this.reason.hidden = !line?.reason;
    setText(this.reason, line?.reason ?? "");
    this.draws.tiles(tiles(stats, tuning));
    this.actions.update(store, state, tuning);
    this.drawCharts(store, version, stats, history);
    this.draws.progress(tuning ?? null, store.server.tuning ?? "off", (stats?.requests_per_second ?? 0) > 0, store.locked.tuning ?? "");
    this.draws.buckets(tuning?.buckets ?? [], store.locked.tuning ?? "");
    this.draws.history(history, store.locked.tuning ?? "");
    this.kernels.update(tuning, store);
    this.tryIt.update(state, version);
  }

  drawCharts(store, version, stats, history) {
    const points = store.points.get(this.name)?.[version] ?? [];
    const end = store.time;
    const engines = [...new Set(points.flatMap((point) => Object.keys(point[this.kind])))].sort();
    const series = engines.flatMap((engine) => [[1, "p50"], [2, "p99"]].map(([index, quantile]) => ({
      name: `${NAMES[engine] ?? engine} ${quantile}`,
      kind: `${engine} ${quantile}`,
      points: points.filter((point) => point[this.kind][engine]).map((point) => [point.t, point[this.kind][engine][index]]),
    })));
    const baseline = stats?.total?.[this.kind]?.onnxruntime;
    if (baseline?.[0]) {
      const begin = end - this.span;
      series.push({ name: "baseline p50 since loaded", kind: "reference p50", points: every(begin, end, baseline[1]) });
      series.push({ name: "baseline p99 since loaded", kind: "reference p99", points: every(begin, end, baseline[2]) });
    }
    this.latency.update({ series, markers: markersOf(history), end, span: this.span });
    this.traffic.node.hidden = !points.length;
    this.traffic.update({
      series: [
        { name: "requests/s", kind: "requests", points: points.map((point) => [point.t, point.rps]) },
        { name: "errors/s", kind: "errors", points: points.map((point) => [point.t, point.eps]) },
      ],
      markers: [],
      end,
      span: this.span,
    });
  }
}

/** A level line: points near enough that the chart joins them. */
function every(begin, end, value) {
  const points = [];
  for (let t = begin; t < end; t += 4) points.push([t, value]);
  points.push([end, value]);
  return points;
}

function tiles(stats, tuning) {
  const now = latencyNow(stats);
  const base = stats?.total?.request?.onnxruntime;
  const tuned = stats?.total?.request?.tvm;
  const ups = speedups(tuning);
  const worst = (tuning?.buckets ?? []).filter((bucket) => bucket.max_error !== null)
    .sort((a, b) => b.max_error / (b.tolerance || 1) - a.max_error / (a.tolerance || 1))[0];
  const since = (told) => (told?.[0] ? `${duration(told[1])} / ${duration(told[2])}` : "–");
  return [
    ["p50 / p99 now", now ? `${duration(now.p50)} / ${duration(now.p99)}` : "–", "last second, whole requests"],
    ["Baseline p50 / p99", since(base), base?.[0] ? `${plural(base[0], "request")} on ONNX Runtime` : "nothing ran on it yet"],
    ["Tuned p50 / p99", since(tuned), tuned?.[0] ? `${plural(tuned[0], "request")} on tuned engines` : "nothing ran on one yet"],
    ["Speed-up", ups.length ? times(Math.max(...ups)) : "–", ups.length > 1 ? `best of ${ups.length}, at least ${times(Math.min(...ups))}` : "measured by the gate"],
    ["Requests/s", stats ? rate(stats.requests_per_second) : "–", stats
      ? `${rate(stats.errors_per_second)} errors/s; ${count(stats.num_successes)} answered, ${count(stats.num_failures)} failed` : ""],
    ["Worst difference", small(worst?.max_error), worst ? `allowed ${small(worst.tolerance)}` : "compared by the gate"],
  ];
}

function progress(tuning, mode, isBusy, key) {
  if (!tuning) return [el("p", { class: "empty" }, key ? `Tuning is behind a key (header ${key}).` : mode === "off" ? "This server was started with --tuning=off." : "Not loaded.")];
  const { job = {} } = tuning;
  const rows = [["State", badge(tuning.state)]];
  if (tuning.state === "tuning") {
    const done = Math.round(tuning.progress * 100);
    rows.push(["Done", el("span", { class: "with-bar" },
      el("progress", { max: 100, value: done, "aria-label": "Share of the job that is done" }), `${done} %`)]);
    rows.push(["At", tuning.reason]);
    if (job.num_measured !== undefined) {
      rows.push(["Candidates", `${count(job.num_built)} built, ${count(job.num_measured)} measured, ${count(job.num_failed)} failed`]);
    }
    if (job.seconds_left !== undefined) rows.push(["Budget left", `${seconds(job.seconds_left)} of running at most; it ends sooner when nothing is left to gain`]);
    if (isBusy) rows.push(["Steps aside", "requests are being answered: tuning takes only what they leave"]);
  } else if (tuning.reason) {
    rows.push([tuning.state === "paused" || tuning.state === "queued" ? "Why" : "Reason", tuning.reason]);
  }
  const verdicts = tuning.buckets.reduce((sums, bucket) => ({ ...sums, [bucket.outcome || "open"]: (sums[bucket.outcome || "open"] ?? 0) + 1 }), {});
  if (tuning.buckets.length) rows.push(["Signatures", Object.entries(verdicts).map(([name, number]) => `${number} ${name}`).join(", ")]);
  return [el("dl", { class: "facts" }, rows.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]))];
}

function section(title, name, ...content) {
  return el("section", { class: "card", "aria-labelledby": `title-${name}`, id: `section-${name}` }, el("h2", { id: `title-${name}` }, title), content);
}

function choice(label, options, chosen, changed) {
  const select = el("select", { onchange: () => changed(select.value) },
    options.map(([value, text]) => el("option", { value, selected: value === chosen }, text)));
  return el("label", {}, label, " ", select);
}
