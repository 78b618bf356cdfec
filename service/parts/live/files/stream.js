// Shows an answer that comes in parts (lines of JSON), part by part.

import { h } from "./dom.js";
import { showProblem } from "./result.js";
import { json } from "./format.js";

const MAX_SHOWN = 20_000; // characters of each instance; the newest are shown
export const LINES_TYPE = "application/jsonl";

/** Shows each part as it comes; returns how many came. Throws if the answer breaks off. */
export async function showParts(place, response) {
  const texts = new Map(); // by instance
  let [numParts, problem, rest] = [0, null, ""];
  const shown = h("div", {});
  place.replaceChildren(h("h3", {}, "Prediction"), shown);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const { instance, part, error } = JSON.parse(line);
      if (error) {
        problem ??= error;
        continue;
      }
      numParts += 1;
      const text = typeof part === "string" ? part : `${json(part)}\n`;
      texts.set(instance, ((texts.get(instance) ?? "") + text).slice(-MAX_SHOWN));
    }
    shown.replaceChildren(...[...texts.values()].map((text) => h("pre", { tabindex: "0" }, text)));
  }
  if (problem) {
    const failed = h("div", {});
    showProblem(failed, problem);
    place.append(failed);
  }
  return numParts;
}
