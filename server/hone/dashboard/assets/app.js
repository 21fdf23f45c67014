// The page: one stream of changes, one view at a time, drawn at most once a frame.

import { announce, el, setAttribute, setText } from "./dom.js";
import { askKeys } from "./dialogs.js";
import { CacheView } from "./cache.js";
import { DeviceView } from "./device.js";
import { ModelView } from "./model.js";
import { ModelsView } from "./models.js";
import { Store } from "./store.js";
import { Stream } from "./stream.js";

const store = new Store();
const main = document.getElementById("main");
const connection = document.getElementById("connection");
const keysButton = document.getElementById("keys");
let view = null;
let connected = "connecting";
let waiting = false;

const stream = new Stream((event, document) => store.hear(event, document), (state, reason) => {
  connected = state;
  connection.title = reason;
  draw();
});

store.listeners.add(() => {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    draw();
  });
});

function draw() {
  const text = connected === "live" ? (store.server.ready ? "live" : "live, not ready") : connected === "lost" ? "connection lost, trying again" : connected;
  setText(connection, text);
  setAttribute(connection, "class", `connection ${connected === "live" && store.server.ready ? "live" : connected}`);
  const isLocked = Object.keys(store.locked).length > 0;
  setText(keysButton, isLocked ? "Keys needed" : "Keys");
  setAttribute(keysButton, "class", isLocked ? "quiet attention" : "quiet");
  if (store.time) view?.update(store);
}

function route() {
  const [, page = "", name = ""] = location.hash.split("/");
  view?.close?.();
  let title = "Models";
  if (page === "models" && name) {
    const model = decodeURIComponent(name);
    view = new ModelView(model, store);
    title = model;
  } else if (page === "cache") {
    view = new CacheView(store);
    title = "Kernels cache";
  } else if (page === "device") {
    view = new DeviceView(store);
    title = "Device";
  } else {
    view = new ModelsView();
  }
  document.title = `${title} – hone`;
  main.replaceChildren(view.node);
  for (const link of document.querySelectorAll("nav a")) {
    const isHere = link.getAttribute("href") === (page === "cache" || page === "device" ? `#/${page}` : "#/");
    setAttribute(link, "aria-current", isHere ? "page" : null);
  }
  draw();
}

window.addEventListener("hashchange", () => {
  if (location.hash === "#main") {
    main.focus(); // the skip link, not a page
    return;
  }
  route();
  scrollTo(0, 0);
  main.focus({ preventScroll: true });
  announce(document.title);
});

keysButton.addEventListener("click", () => askKeys(store.locked, () => {
  stream.start();
  view?.retry?.();
}));

// --- light and dark: as the system has it, unless told otherwise

const themeButton = document.getElementById("theme");
const THEMES = ["system", "light", "dark"];
let theme = "system";
try {
  theme = localStorage.getItem("hone-theme") ?? "system";
} catch {
  // Storage is off: the system's theme it is.
}

function applyTheme() {
  setAttribute(document.documentElement, "data-theme", theme === "system" ? null : theme);
  setText(themeButton, `Theme: ${theme}`);
}

themeButton.addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  try {
    localStorage.setItem("hone-theme", theme);
  } catch {
    // Storage is off: it holds until the page is left.
  }
  applyTheme();
});

applyTheme();
route();
stream.start();
