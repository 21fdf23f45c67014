// Questions before something is done, and the keys.

import { el, announce } from "./dom.js";
import { keyHeaders, setKeys } from "./keys.js";

/** Asks; resolves to whether the answer was yes. Escape and the browser's back key mean no. */
export function confirm(title, text, yes, dangerous = false) {
  return new Promise((resolve) => {
    const heading = el("h2", { id: "dialog-title" }, title);
    const dialog = el("dialog", { "aria-labelledby": "dialog-title", "aria-describedby": "dialog-text" },
      el("div", { class: "dialog" }, heading, el("p", { id: "dialog-text" }, text),
        el("div", { class: "buttons" },
          el("button", { type: "button", onclick: () => dialog.close("no") }, "Cancel"),
          el("button", { type: "button", class: dangerous ? "danger" : "primary", onclick: () => dialog.close("yes") }, yes))));
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes");
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** One field for each header that some group of endpoints asks for. `changed` is called when keys were given. */
export function askKeys(locked, changed) {
  const known = keyHeaders();
  const headers = [...new Set([...Object.values(locked), ...Object.keys(known)])].sort();
  const groups = (header) => Object.entries(locked).filter(([, asked]) => asked === header).map(([group]) => group);
  const fields = headers.map((header) => {
    const missing = groups(header);
    const input = el("input", { type: "password", autocomplete: "off", value: known[header] ?? "", name: header });
    return { header, input, node: el("label", { class: "field" }, header, input,
      el("span", { class: "hint" }, missing.length ? `opens ${missing.join(", ")}` : "accepted")) };
  });
  const done = () => {
    setKeys(Object.fromEntries(fields.map(({ header, input }) => [header, input.value])));
    dialog.close();
    announce("Keys are sent with every request from now on");
    changed();
  };
  const dialog = el("dialog", { "aria-labelledby": "keys-title" },
    el("div", { class: "dialog" },
      el("h2", { id: "keys-title" }, "Keys"),
      el("p", {}, headers.length
        ? "Some endpoints of this server are behind a key. Keys stay in this tab and are forgotten with it."
        : "No endpoint that this page uses is behind a key."),
      fields.map((field) => field.node),
      el("div", { class: "buttons" },
        el("button", { type: "button", onclick: () => dialog.close() }, headers.length ? "Cancel" : "Close"),
        headers.length ? el("button", { type: "button", class: "primary", onclick: done }, "Use these keys") : null)));
  dialog.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && event.target.tagName === "INPUT") done();
  });
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}
