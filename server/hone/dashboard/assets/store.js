// What is known of the server: the last snapshot and every change since.

const MAX_POINTS = 600;

export class Store {
  constructor() {
    this.time = 0;
    this.server = {};
    this.models = new Map();
    this.locked = {};
    this.points = new Map();
    this.listeners = new Set();
  }

  hear(event, document) {
    if (event === "locked") this.locked = document;
    else if (event === "snapshot") this.replace(document);
    else if (event === "delta") this.change(document);
    for (const listener of this.listeners) listener();
  }

  replace(snapshot) {
    this.time = snapshot.time;
    this.server = snapshot.server;
    this.models = new Map(Object.entries(snapshot.models));
  }

  change(delta) {
    this.time = delta.time;
    if (delta.server) this.server = delta.server;
    for (const [name, parts] of Object.entries(delta.models ?? {})) {
      const known = { ...(this.models.get(name) ?? {}) };
      for (const [part, value] of Object.entries(parts)) {
        if (value === null) delete known[part];
        else known[part] = value;
      }
      this.models.set(name, known);
      if (parts.stats) this.addPoints(name, parts.stats);
    }
    for (const name of delta.gone ?? []) {
      this.models.delete(name);
      this.points.delete(name);
    }
  }

  /** Points that the server kept from before this page was opened. */
  addEarlier(name, versions) {
    const known = this.points.get(name) ?? {};
    for (const [version, earlier] of Object.entries(versions)) {
      const later = known[version] ?? [];
      const first = later[0]?.t ?? Infinity;
      known[version] = [...earlier.filter((point) => point.t < first - 0.5), ...later];
    }
    this.points.set(name, known);
  }

  addPoints(name, stats) {
    const known = this.points.get(name) ?? {};
    for (const [version, told] of Object.entries(stats)) {
      const points = (known[version] ??= []);
      const point = {
        t: this.time,
        rps: told.requests_per_second,
        eps: told.errors_per_second,
        request: told.window.request ?? {},
        execution: told.window.execution ?? {},
      };
      const last = points.at(-1);
      if (!point.rps && !point.eps && last && !last.rps && !last.eps) continue;
      points.push(point);
      if (points.length > MAX_POINTS) points.shift();
    }
    this.points.set(name, known);
  }
}

// --- what follows from it

/** The newest version of a model that is known, as the list shows it. */
export function newest(parts) {
  const versions = (parts.index ?? []).map((line) => line.version).filter(Boolean);
  const served = Object.keys(parts.stats ?? parts.tuning ?? {});
  const found = [...new Set(served.length ? served : versions)].sort((a, b) => Number(b) - Number(a));
  return found[0] ?? "";
}

export function lineOf(parts, version) {
  const lines = parts.index ?? [];
  return lines.find((line) => line.version === version) ?? lines[0] ?? null;
}

/** {text, kind}: which engine answers now. */
export function engineOf(tuning, stats) {
  if (tuning?.buckets?.length) {
    const tuned = tuning.buckets.filter((bucket) => bucket.engine === "tvm").length;
    if (!tuned) return { text: "ONNX Runtime", kind: "baseline" };
    const all = tuning.buckets.length;
    return { text: tuned === all ? "tuned" : `tuned, ${tuned} of ${all}`, kind: "tuned" };
  }
  return stats || tuning ? { text: "ONNX Runtime", kind: "baseline" } : { text: "none", kind: "off" };
}

/** The p50 and p99 of the last second over all engines, weighed by hits; null where nothing ran. */
export function latencyNow(stats) {
  const engines = Object.values(stats?.window?.request ?? {});
  const hits = engines.reduce((sum, [n]) => sum + n, 0);
  if (!hits) return null;
  const weighed = (index) => engines.reduce((sum, engine) => sum + engine[0] * engine[index], 0) / hits;
  return { p50: weighed(1), p99: weighed(2) };
}

export function speedups(tuning) {
  return (tuning?.buckets ?? []).filter((bucket) => bucket.engine === "tvm" && bucket.speedup).map((b) => b.speedup);
}
