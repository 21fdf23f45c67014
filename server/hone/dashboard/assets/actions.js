// What one can do to a model. Everything is asked first, goes through the server's ordinary endpoints, and says what came of it.

import { call, modelPath } from "./api.js";
import { confirm } from "./dialogs.js";
import { announce, el, setAttribute, setText } from "./dom.js";

const ACTIONS = [
  { id: "start", text: "Tune now", tuning: "start", title: "Tune it now?",
    question: "Tuning starts, or goes on, with fresh time. What failed is tried again, verdicts stand. Requests go on being answered." },
  { id: "retune", text: "Tune anew", tuning: "retune", title: "Ask everything again?",
    question: "Every refusal and failure is forgotten and measured again. What serves goes on serving until it is refused." },
  { id: "pause", text: "Pause", tuning: "pause", title: "Pause tuning?",
    question: "No more work is done on it until it is started again, also after a restart. What serves goes on serving." },
  { id: "roll_back", text: "Roll back", tuning: "roll_back", dangerous: true, title: "Roll back to the baseline?",
    question: "Every signature returns to ONNX Runtime, and tuning stops until it is started again." },
  { id: "pin_baseline", text: "Pin baseline", tuning: "pin_baseline", dangerous: true, title: "Pin the baseline?",
    question: "Every signature returns to ONNX Runtime and stays there, also after a restart, until tuning is started again." },
  { id: "load", text: "Load", repository: "load", title: "Load it?",
    question: "The model is read from the repository (anew, if it is loaded). What serves goes on serving until the new one is ready." },
  { id: "unload", text: "Unload", repository: "unload", dangerous: true, title: "Unload it?",
    question: "It takes no more requests; those in flight are finished." },
];

export function actionBar(subject) {
  const outcome = el("p", { class: "outcome", role: "status" });
  const buttons = ACTIONS.map((action) => el("button", { type: "button", class: action.dangerous ? "dangerous" : null,
    "data-action": action.id, onclick: () => run(action, subject(), outcome) }, action.text));
  const why = el("p", { class: "hint" });
  const node = el("div", { class: "actions", role: "group", "aria-label": "Actions" }, el("div", { class: "buttons" }, buttons), why, outcome);

  function update(store, state, tuning) {
    const isExplicit = store.server.control_mode === "explicit";
    const canTune = Boolean(tuning) && tuning.state !== "off";
    buttons.forEach((button, index) => {
      const action = ACTIONS[index];
      const isLocked = action.tuning ? store.locked.tuning : store.locked["model-repository"];
      const can = action.tuning ? canTune || Boolean(isLocked) : isExplicit && (action.id === "load" || state === "READY");
      setAttribute(button, "disabled", can ? null : "");
    });
    const notes = [];
    if (!isExplicit) notes.push(`Load and unload need --model-control-mode=explicit (this server: ${store.server.control_mode}).`);
    if (!canTune && !store.locked.tuning) notes.push(tuning ? "Tuning is off for this model."
      : store.server.tuning === "off" ? "Tuning is off: this server was started with --tuning=off." : "There is nothing to tune while it is not loaded.");
    setText(why, notes.join(" "));
  }

  return { node, update };
}

async function run(action, { name, version }, outcome) {
  if (!(await confirm(`${name}: ${action.title}`, action.question, action.text, action.dangerous))) return;
  setAttribute(outcome, "class", "outcome");
  setText(outcome, `${action.text}: asked`);
  try {
    if (action.tuning) {
      const told = await call("POST", `${modelPath(name, version)}/tuning`, { action: action.tuning });
      setText(outcome, `${action.text}: done, tuning is now “${told.state}”${told.reason ? ` (${told.reason})` : ""}`);
    } else {
      await call("POST", `/v2/repository/models/${encodeURIComponent(name)}/${action.repository}`, {});
      setText(outcome, `${action.text}: done`);
    }
  } catch (problem) {
    setAttribute(outcome, "class", "outcome failed");
    setText(outcome, `${action.text}: ${problem.message}`);
    announce(outcome.textContent);
  }
}
