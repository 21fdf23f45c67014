// Elements without a framework. Nothing here ever parses text as HTML: what a server says stays text.

const SVG = "http://www.w3.org/2000/svg";

/** An element; attributes that begin with "on" are listeners, null and false ones are left out. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Changes the text only where it is another one, so that screen readers and selections are left alone. */
export function setText(node, text) {
  const wanted = String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
  return node;
}

export function setAttribute(node, name, value) {
  if (value === null || value === false) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, String(value));
}

/** Makes `parent` hold exactly these children, touching only what is not in its place already. */
export function setChildren(parent, children) {
  children.forEach((child, index) => {
    if (parent.childNodes[index] !== child) parent.insertBefore(child, parent.childNodes[index] ?? null);
  });
  while (parent.childNodes.length > children.length) parent.lastChild.remove();
}

/** Calls `draw` again only when what it draws has changed. */
export function memo(draw) {
  let last;
  return (value, ...rest) => {
    const key = JSON.stringify([value, rest]);
    if (key === last) return;
    last = key;
    draw(value, ...rest);
  };
}

/** A bar whose length is a share of its place. Lengths are set through the object model: inline styles are not allowed. */
export function bar(share, kind = "", title = "") {
  const filled = el("span", { class: `fill ${kind}` });
  filled.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  return el("span", { class: "bar", title: title || null, "aria-hidden": "true" }, filled);
}

export function badge(text, kind = text) {
  return el("span", { class: `badge ${kind}` }, text);
}

/** A table that may scroll sideways by itself, with the keyboard too. */
export function table(caption, heads, rows, kind = "") {
  return scroller(caption, el("table", { class: kind },
    el("caption", { class: "hidden" }, caption),
    el("thead", {}, el("tr", {}, heads.map((head) =>
      el("th", { scope: "col", class: head.number ? "number" : null }, head.name ?? head)))),
    el("tbody", {}, rows)));
}

/** A place in which `content` scrolls sideways; only while it does not fit is it a stop for the keyboard. */
export function scroller(caption, content) {
  const place = el("div", { class: "scroller" }, content);
  const overflowing = () => {
    const isWide = place.scrollWidth > place.clientWidth;
    setAttribute(place, "tabindex", isWide ? "0" : null);
    setAttribute(place, "role", isWide ? "region" : null);
    setAttribute(place, "aria-label", isWide ? caption : null);
  };
  const observer = new ResizeObserver(overflowing);
  observer.observe(place);
  observer.observe(content);
  return place;
}

/** Tells screen readers what has happened. */
export function announce(text) {
  document.getElementById("announcer").textContent = text;
}
