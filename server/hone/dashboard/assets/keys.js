// Keys of restricted endpoints: kept for this tab only, sent with every request of the page.

const PLACE = "hone-keys";

function read() {
  try {
    return JSON.parse(sessionStorage.getItem(PLACE)) ?? {};
  } catch {
    return {}; // storage is off, or somebody else wrote there: as if no key had been given
  }
}

let kept = read();

/** Headers to send, by name. */
export function keyHeaders() {
  return { ...kept };
}

export function setKeys(keys) {
  kept = Object.fromEntries(Object.entries(keys).filter(([name, value]) => name && value));
  try {
    sessionStorage.setItem(PLACE, JSON.stringify(kept));
  } catch {
    // Storage is off: the keys live as long as the page.
  }
}
