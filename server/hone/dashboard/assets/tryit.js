// An input by hand: JSON, a picture or a .npy in; outputs with their labels, and how long it took, out.

import { call, modelPath } from "./api.js";
import { bar, el, setAttribute, setText, table } from "./dom.js";
import { duration, small } from "./format.js";
import { readFile, readJson } from "./tensors.js";

const MAX_CLASSES = 5;
const MAX_SHOWN = 24;

export class TryIt {
  constructor(name) {
    this.name = name;
    this.version = "";
    this.isAsked = false;
    this.inputs = [];
    this.urls = [];
    this.fields = el("div", { class: "inputs" });
    this.button = el("button", { type: "submit", class: "primary" }, "Send");
    this.outcome = el("p", { class: "outcome", role: "status" });
    this.place = el("div");
    this.form = el("form", { onsubmit: (event) => {
      event.preventDefault();
      this.send();
    } }, this.fields, el("div", { class: "buttons" }, this.button));
    this.node = el("div", {}, this.form, this.outcome, this.place);
  }

  update(state, version) {
    const isReady = state === "READY";
    setAttribute(this.button, "disabled", isReady && this.inputs.length ? null : "");
    if (!isReady || (this.isAsked && version === this.version)) return;
    this.isAsked = true;
    this.version = version;
    this.describe();
  }

  retry() {
    this.isAsked = false;
  }

  close() {
    for (const url of this.urls) URL.revokeObjectURL(url);
  }

  /** Asks which inputs there are, and which outputs have labels. */
  async describe() {
    try {
      const metadata = await call("GET", modelPath(this.name, this.version));
      const config = await call("GET", `${modelPath(this.name, this.version)}/config`).catch(() => ({}));
      this.labelled = new Set((config.output ?? []).filter((output) => output.label_filename).map((output) => output.name));
      this.outputs = metadata.outputs;
      this.inputs = metadata.inputs.map((spec) => this.input(spec));
      this.fields.replaceChildren(...this.inputs.map((input) => input.node));
      setAttribute(this.button, "disabled", null);
      setText(this.outcome, "");
    } catch (problem) {
      this.fail(problem);
    }
  }

  input(spec) {
    const id = `input-${spec.name}`;
    const preview = el("img", { class: "preview", alt: "", hidden: true });
    const text = el("textarea", { id, rows: 3, spellcheck: "false", placeholder: "[[0, 0.5, …], …]", name: spec.name });
    const file = el("input", { type: "file", accept: ".json,.npy,image/*", "aria-label": `File for ${spec.name}`, onchange: () => {
      const [chosen] = file.files;
      preview.hidden = !chosen?.type.startsWith("image/");
      if (!preview.hidden) {
        preview.src = URL.createObjectURL(chosen);
        this.urls.push(preview.src);
      }
      if (chosen) text.value = "";
    } });
    text.addEventListener("input", () => {
      file.value = "";
      preview.hidden = true;
    });
    return {
      spec,
      read: async () => {
        if (file.files.length) return readFile(file.files[0], spec);
        if (text.value.trim()) return readJson(text.value, spec);
        if (spec.optional) return null;
        throw new Error(`'${spec.name}' is empty: give JSON, or choose a file`);
      },
      node: el("fieldset", {}, el("legend", {}, el("code", {}, `${spec.name} ${spec.datatype} [${spec.shape.join(", ")}]`)),
        el("label", { for: id, class: "hint" }, "JSON, or a file (.json, .npy, picture)"), text, el("div", { class: "file" }, file, preview)),
    };
  }

  async send() {
    setAttribute(this.outcome, "class", "outcome");
    setText(this.outcome, "Sending");
    setAttribute(this.button, "disabled", "");
    try {
      const { body, headers } = await this.request();
      const began = performance.now();
      const answer = await call("POST", `${modelPath(this.name, this.version)}/infer`, body, headers);
      const took = (performance.now() - began) * 1e3;
      setText(this.outcome, `Answered in ${duration(took)} (with the way there and back) by version ${answer.model_version}`);
      this.place.replaceChildren(...answer.outputs.map((output) => this.output(output)));
    } catch (problem) {
      this.fail(problem);
    } finally {
      setAttribute(this.button, "disabled", null);
    }
  }

  async request() {
    const inputs = [];
    const parts = [];
    for (const { spec, read } of this.inputs) {
      const found = await read();
      if (!found) continue;
      const tensor = { name: spec.name, datatype: spec.datatype, shape: found.shape };
      if (found.bytes) {
        tensor.parameters = { binary_data_size: found.bytes.byteLength };
        parts.push(found.bytes);
      } else tensor.data = found.data;
      inputs.push(tensor);
    }
    const outputs = this.outputs.map(({ name }) => ({ name, parameters: this.labelled.has(name) ? { classification: MAX_CLASSES, binary_data: false } : { binary_data: false } }));
    const head = new TextEncoder().encode(JSON.stringify({ inputs, outputs }));
    return {
      body: new Blob([head, ...parts]),
      headers: parts.length ? { "Inference-Header-Content-Length": String(head.length), "Content-Type": "application/octet-stream" } : { "Content-Type": "application/json" },
    };
  }

  output({ name, datatype, shape, data }) {
    if (this.labelled.has(name)) {
      const rows = data.map((entry) => {
        const [score, index, ...label] = String(entry).split(":");
        return { score: Number(score), label: label.join(":") || `class ${index}` };
      });
      const most = Math.max(...rows.map((row) => Math.abs(row.score)), 1e-12);
      return el("div", {}, el("h3", {}, "Best of ", el("code", {}, name)), table(`Classes of ${name}`, ["Label", "Score"], rows.map((row) => el("tr", {},
        el("th", { scope: "row" }, row.label), el("td", {}, el("span", { class: "with-bar" }, bar(row.score / most, "tuned"), small(row.score)))))));
    }
    const shown = data.slice(0, MAX_SHOWN).map((value) => (typeof value === "number" ? small(value) : String(value)));
    const title = el("h3", {}, el("code", {}, `${name} ${datatype} [${shape.join(", ")}]`));
    return el("div", {}, title, el("pre", { tabindex: "0" }, shown.join("  ") + (data.length > MAX_SHOWN ? `  … ${data.length - MAX_SHOWN} more` : "")));
  }

  fail(problem) {
    setAttribute(this.outcome, "class", "outcome failed");
    setText(this.outcome, problem.message);
  }
}
