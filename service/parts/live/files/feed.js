// Listens to GET events: by fetch, since an EventSource can send no key.

import { keyHeaders } from "./keys.js";

const SILENT_MS = 6000; // an event comes each second
const FIRST_PAUSE_MS = 1000;
const MAX_PAUSE_MS = 15_000;

export class Feed {
  #on;
  #controller = null;
  #timer = null;
  #watchdog = null;
  #failures = 0;

  /** `on` has onState(state), onLost(reason, retryInMs), and onRefused(problem) for keys. */
  constructor(on) {
    this.#on = on;
  }

  /** Connect, at once. */
  async start() {
    this.stop();
    const controller = new AbortController();
    this.#controller = controller;
    let reason = "the connection ended";
    try {
      this.#watch(controller);
      const response = await fetch("events", {
        headers: { Accept: "text/event-stream", ...keyHeaders("metrics") },
        cache: "no-store",
        signal: controller.signal,
      });
      if (response.status === 401 || response.status === 403) {
        const problem = await response.json();
        this.stop();
        this.#on.onRefused(problem);
        return;
      }
      if (!response.ok) throw new Error(`events answered ${response.status}`);
      await this.#read(response.body, controller);
    } catch (error) {
      if (this.#controller !== controller) return; // stopped, or started anew
      reason = controller.signal.aborted ? "nothing came for a while" : error.message;
    }
    if (this.#controller !== controller) return;
    this.stop();
    const pause = Math.min(FIRST_PAUSE_MS * 2 ** this.#failures, MAX_PAUSE_MS) * (0.8 + 0.4 * Math.random());
    this.#failures += 1;
    this.#timer = setTimeout(() => this.start(), pause);
    this.#on.onLost(reason, pause);
  }

  /** Disconnect. */
  stop() {
    clearTimeout(this.#timer);
    clearTimeout(this.#watchdog);
    const controller = this.#controller;
    this.#controller = null;
    controller?.abort();
  }

  #watch(controller) {
    clearTimeout(this.#watchdog);
    this.#watchdog = setTimeout(() => controller.abort(), SILENT_MS);
  }

  async #read(body, controller) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      this.#watch(controller);
      const events = (text + value).split("\n\n");
      text = events.pop();
      for (const event of events) {
        const data = event.split("\n").filter((line) => line.startsWith("data: "));
        if (!data.length) continue;
        this.#failures = 0;
        this.#on.onState(JSON.parse(data.map((line) => line.slice(6)).join("\n")));
      }
    }
  }
}
