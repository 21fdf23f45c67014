// A line chart over time in SVG: any number of series, markers, a cross-hair for mouse and arrow keys.

import { el, svg, setText } from "./dom.js";
import { clock } from "./format.js";

const HEIGHT = 220;
const LEFT = 62;
const RIGHT = 12;
const TOP = 24;
const BOTTOM = 26;

export class LineChart {
  /** `format` makes text of a value; `log` draws the values on a logarithmic scale. */
  constructor({ label, format, log = false, height = HEIGHT }) {
    this.label = label;
    this.format = format;
    this.log = log;
    this.height = height;
    this.data = { series: [], markers: [], end: 0, span: 120 };
    this.at = null;
    this.svg = svg("svg", { class: "chart", role: "img", tabindex: "0", height,
      onpointermove: (event) => this.point(event), onpointerleave: () => this.pointAt(null),
      onkeydown: (event) => this.key(event), onblur: () => this.pointAt(null) });
    this.readout = el("p", { class: "readout", "aria-live": "off" });
    this.legend = el("ul", { class: "legend" });
    this.node = el("figure", { class: "figure" }, this.legend, this.svg, this.readout);
    new ResizeObserver(() => this.draw()).observe(this.node);
  }

  /** `series`: [{name, kind, points: [[t, value]]}], `markers`: [{t, text, kind}], `end` and `span` in seconds. */
  update(data) {
    this.data = data;
    this.draw();
  }

  draw() {
    const width = Math.round(this.node.clientWidth);
    if (!width) return;
    const { series, markers, end, span } = this.data;
    const begin = end - span;
    const shown = series.map((one) => ({ ...one, points: one.points.filter(([t]) => t >= begin - 2 && t <= end + 1) }));
    const values = shown.flatMap((one) => one.points.map(([, value]) => value)).filter((value) => !this.log || value > 0);
    this.x = (t) => LEFT + ((t - begin) / span) * (width - LEFT - RIGHT);
    const [low, high] = this.domain(values);
    const scale = this.log ? Math.log : (value) => value;
    this.y = (value) => TOP + (1 - (scale(Math.max(value, low)) - scale(low)) / (scale(high) - scale(low) || 1)) * (this.height - TOP - BOTTOM);
    this.shown = shown;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    this.svg.setAttribute("aria-label", this.describe(shown, markers.filter((marker) => marker.t >= begin)));
    this.svg.replaceChildren(
      ...this.grid(values.length ? this.ticks(low, high) : [], width, begin, span),
      ...markers.filter((marker) => marker.t >= begin && marker.t <= end).flatMap((marker, index) => this.marker(marker, index, width)),
      ...shown.flatMap((one) => this.line(one)),
      ...(values.length ? [] : [svg("text", { x: width / 2, y: this.height / 2, class: "nothing" }, "no requests yet: this draws itself as they come")]),
    );
    this.cross = svg("line", { class: "cross", y1: TOP, y2: this.height - BOTTOM, visibility: "hidden" });
    this.svg.append(this.cross);
    this.tell();
    const wanted = shown.filter((one) => one.points.length).map((one) => `${one.name}\0${one.kind}`).join("\n");
    if (wanted !== this.drawn) {
      this.drawn = wanted;
      this.legend.replaceChildren(...shown.filter((one) => one.points.length).map((one) =>
        el("li", {}, svg("svg", { width: 22, height: 10, "aria-hidden": "true" }, svg("line", { x1: 1, x2: 21, y1: 5, y2: 5, class: `line ${one.kind}` })), one.name)));
    }
  }

  domain(values) {
    if (!values.length) return this.log ? [1, 10] : [0, 1];
    const low = values.reduce((a, b) => Math.min(a, b));
    const high = values.reduce((a, b) => Math.max(a, b));
    return this.log ? [low / 1.25, high * 1.25] : [0, high * 1.15 || 1];
  }

  ticks(low, high) {
    if (!this.log) return level(low, high);
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
      for (const factor of [1, 1.5, 2, 3, 5, 7]) {
        const value = factor * 10 ** power;
        if (value >= low && value <= high) found.push(value);
      }
    }
    if (found.length < 3) return level(low, high); // all within a factor of two or so
    const every = Math.ceil(found.length / 6);
    return found.filter((_, index) => index % every === 0);
  }

  grid(ticks, width, begin, span) {
    const lines = ticks.flatMap((value) => [
      svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: this.y(value), y2: this.y(value) }),
      svg("text", { class: "tick", x: LEFT - 8, y: this.y(value) + 4, "text-anchor": "end" }, this.format(value)),
    ]);
    const step = nice(span / Math.max(2, Math.floor((width - LEFT) / 110)));
    for (let t = Math.ceil(begin / step) * step; t <= begin + span; t += step) {
      lines.push(svg("text", { class: "tick", x: this.x(t), y: this.height - 8, "text-anchor": "middle" }, clock(t)));
    }
    return lines;
  }

  line({ points, kind }) {
    const gap = 5; // seconds without a point: nothing ran, so no line says otherwise
    let path = "";
    let last = -Infinity;
    const alone = [];
    points.forEach(([t, value], index) => {
      const joins = t - last <= gap;
      path += `${joins ? "L" : "M"}${this.x(t).toFixed(1)} ${this.y(value).toFixed(1)}`;
      const next = points[index + 1]?.[0] ?? Infinity;
      if (!joins && next - t > gap) alone.push([t, value]);
      last = t;
    });
    return [
      ...(path ? [svg("path", { class: `line ${kind}`, d: path })] : []),
      ...alone.map(([t, value]) => svg("circle", { class: `dot ${kind}`, cx: this.x(t), cy: this.y(value), r: 2.5 })),
    ];
  }

  marker({ t, text, kind }, index, width) {
    const x = this.x(t);
    const right = x > width - 130;
    return [
      svg("line", { class: `marker ${kind}`, x1: x, x2: x, y1: TOP - 6 , y2: this.height - BOTTOM }),
      svg("text", { class: `marker-text ${kind}`, x: right ? x - 4 : x + 4, y: TOP - 10 + (index % 2) * 12, "text-anchor": right ? "end" : "start" }, text),
    ];
  }

  describe(shown, markers) {
    const last = shown.filter((one) => one.points.length).map((one) => `${one.name} ${this.format(one.points.at(-1)[1])}`);
    const swaps = markers.length ? `; ${markers.map((marker) => `${marker.text} at ${clock(marker.t)}`).join(", ")}` : "";
    return `${this.label}: ${last.join(", ") || "no data"}${swaps}. Arrow keys read single seconds.`;
  }

  // --- the cross-hair

  point(event) {
    const box = this.svg.getBoundingClientRect();
    const { end, span } = this.data;
    const share = (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
    this.pointAt(end - span + share * span);
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    if (!step) return;
    event.preventDefault();
    this.readout.setAttribute("aria-live", "polite");
    const { end, span } = this.data;
    this.pointAt(Math.min(end, Math.max(end - span, (this.at ?? end) + step)));
  }

  pointAt(t) {
    this.at = t;
    if (t === null) this.readout.setAttribute("aria-live", "off");
    this.tell();
  }

  tell() {
    const nearest = (points) => points.reduce((best, point) =>
      (Math.abs(point[0] - this.at) < Math.abs((best?.[0] ?? Infinity) - this.at) ? point : best), null);
    if (this.at === null || !this.shown) {
      this.cross?.setAttribute("visibility", "hidden");
      setText(this.readout, "");
      return;
    }
    const found = this.shown.map((one) => [one.name, nearest(one.points)]).filter(([, point]) => point && Math.abs(point[0] - this.at) < 2);
    this.cross.setAttribute("visibility", "visible");
    this.cross.setAttribute("x1", this.x(this.at));
    this.cross.setAttribute("x2", this.x(this.at));
    setText(this.readout, `${clock(this.at)}  ${found.map(([name, point]) => `${name} ${this.format(point[1])}`).join("   ") || "nothing ran"}`);
  }
}

/** Round values, equally far apart. */
function level(low, high) {
  const step = nice((high - low) / 4);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high; value += step) found.push(value);
  return found;
}

function nice(raw) {
  const power = 10 ** Math.floor(Math.log10(Math.max(raw, 1e-9)));
  return power * ([1, 2, 5, 10].find((factor) => factor * power >= raw) ?? 10);
}
