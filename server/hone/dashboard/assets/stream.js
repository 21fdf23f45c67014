// The server's events. Read with fetch, since an EventSource cannot send keys; comes back by itself.

import { keyHeaders } from "./keys.js";

const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 10_000;
/** Without a word for so long (there is one a second) the connection is dead, whatever the system thinks. */
const SILENCE_MS = 15_000;

export class Stream {
  /** `on(event, document)` hears snapshot, delta and locked; `tell(state)` hears live, connecting and lost. */
  constructor(on, tell) {
    this.on = on;
    this.tell = tell;
    this.attempt = null;
    this.pause = FIRST_PAUSE_MS;
    this.timer = 0;
  }

  start() {
    clearTimeout(this.timer);
    this.attempt?.abort();
    const attempt = (this.attempt = new AbortController());
    this.read(attempt).catch((problem) => problem).then((problem) => {
      if (this.attempt !== attempt) return; // another one has begun
      this.tell("lost", problem?.message ?? "the server ended the stream");
      this.timer = setTimeout(() => this.start(), this.pause);
      this.pause = Math.min(this.pause * 2, LONGEST_PAUSE_MS);
    });
  }

  async read(attempt) {
    const response = await fetch("/dashboard/events", { headers: keyHeaders(), signal: attempt.signal });
    if (!response.ok) throw new Error(`the server answered ${response.status}`);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const silence = setTimeout(() => attempt.abort(new Error("the server has gone silent")), SILENCE_MS);
      const { value, done } = await reader.read().finally(() => clearTimeout(silence));
      if (done) return;
      text += value;
      const events = text.split("\n\n");
      text = events.pop();
      for (const event of events) this.hear(event);
    }
  }

  hear(event) {
    let name = "message";
    let data = "";
    for (const line of event.split("\n")) {
      if (line.startsWith("event: ")) name = line.slice(7);
      else if (line.startsWith("data: ")) data += line.slice(6);
    }
    if (!data) return;
    if (name === "snapshot") {
      this.pause = FIRST_PAUSE_MS;
      this.tell("live", "");
    }
    this.on(name, JSON.parse(data));
  }
}
