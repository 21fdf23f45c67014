// What this machine is and what is installed: the facts of `hone doctor`.

import { call } from "./api.js";
import { badge, el, setText, table } from "./dom.js";
import { bytes, seconds } from "./format.js";

export class DeviceView {
  constructor() {
    this.server = el("p", { class: "hint" });
    this.place = el("div", {}, el("p", { class: "empty" }, "Examining the machine."));
    this.node = el("article", {}, el("h1", {}, "Device and toolchain"), this.server, this.place);
    this.load();
  }

  update(store) {
    const { version, started, tuning, control_mode: control } = store.server;
    const up = Math.round((store.time - started) / 10) * 10;
    setText(this.server, `hone ${version}, up for ${seconds(up)}, tuning ${tuning}, control mode ${control}`);
  }

  retry() {
    this.load();
  }

  async load() {
    try {
      this.place.replaceChildren(...draw(await call("GET", "/dashboard/device")));
    } catch (problem) {
      this.place.replaceChildren(el("p", { class: "outcome failed" }, problem.message));
    }
  }
}

function draw({ device, findings }) {
  const { caches = {}, toolchain = {}, features = [], ...rest } = device.fields;
  const facts = [
    ["Processor", device.name],
    ["Caches", Object.entries(caches).map(([name, size]) => `${name} ${bytes(size)}`).join(", ")],
    ["Quota", rest.cpu_quota === null || rest.cpu_quota === undefined ? "none" : String(rest.cpu_quota)],
    ["Toolchain", Object.entries(toolchain).map(([name, value]) => `${name} ${value}`).join(", ")],
    ["Device key", el("code", {}, device.digest)],
    ["Instruction sets", el("code", { class: "parameters" }, features.join(" "))],
  ];
  return [
    el("section", { class: "card" }, el("h2", {}, "Device"), el("dl", { class: "facts" },
      facts.filter(([, value]) => value).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]))),
    el("section", { class: "card" }, el("h2", {}, "What is installed, and what is missing"),
      table("Findings of hone doctor", ["What", "State", "Found, or what it costs"], findings.map((one) => el("tr", {},
        el("th", { scope: "row" }, one.name), el("td", {}, one.found ? badge("found", "passed") : badge("missing", "refused")), el("td", {}, one.found || one.cost))))),
  ];
}
