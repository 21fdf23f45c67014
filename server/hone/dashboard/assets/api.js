// Requests to the server's own endpoints. What goes wrong is an Error that says what the server said.

import { keyHeaders } from "./keys.js";

export async function call(method, path, body, headers = {}) {
  const isJson = body !== undefined && !(body instanceof Blob);
  let response;
  try {
    response = await fetch(path, {
      method,
      headers: { ...(isJson ? { "Content-Type": "application/json" } : {}), ...keyHeaders(), ...headers },
      body: isJson ? JSON.stringify(body) : body,
    });
  } catch (problem) {
    throw new Error(`the server cannot be reached: ${problem.message}`);
  }
  const text = await response.text();
  let answer = null;
  try {
    answer = text ? parse(text) : null;
  } catch {
    throw new Error(`the server answered ${response.status} with something that is not JSON`);
  }
  if (!response.ok) throw new Error(answer?.error ?? `the server answered ${response.status}`);
  return answer;
}

/** JSON as the protocol has it: NaN and Infinity are numbers there. */
function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    const bare = /"(?:[^"\\]|\\.)*"|-?Infinity|NaN/g;
    return JSON.parse(text.replace(bare, (found) => (found.startsWith('"') ? found : `"${found}"`)));
  }
}

export function modelPath(model, version = "") {
  return `/v2/models/${encodeURIComponent(model)}${version ? `/versions/${encodeURIComponent(version)}` : ""}`;
}
