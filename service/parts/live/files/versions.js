// The versions of the chosen model: what is being changed, how they compared, and the last steps.

import { $, h, keep, setText } from "./dom.js";
import { bytes, durationText, plural, timeOfDay } from "./format.js";

const LEVELS = { serving: "good", loading: "idle", comparing: "idle", kept: "idle", leaving: "idle", gone: "idle", refused: "bad", rolled_back: "bad" };
const NUM_VERSIONS = 6;
const NUM_STEPS = 8;

/** Shows a model's part of /health, and the latest steps of changes of all models. */
export function showVersions(model, steps) {
  const own = steps.filter((step) => step.model === model.name).slice(0, NUM_STEPS);
  $("versions-part").hidden = model.versions.length < 2 && !model.change && !own.length;
  setText($("versions-count"), model.version === null ? "" : `version ${model.version} serves`);
  $("change").hidden = !model.change;
  setText($("change"), model.change);
  keep($("versions"), model.versions.slice(0, NUM_VERSIONS).map(shownOf), (version) => version.number, makeVersion);
  keep($("steps"), own, (step) => `${step.time} ${step.version} ${step.state}`, makeStep);
}

function shownOf({ number, state, source, weights, reason, figures }) {
  return { number, state, source, weights, reason, facts: figures ? factsOf(figures) : [] };
}

/** How a version compared with the one that served then. */
function factsOf(figures) {
  const percent = (share) => `${(100 * share).toFixed(share === 1 ? 0 : 2)} %`;
  const facts = [`${plural(figures.num_inputs, "input")} compared, ${figures.num_live} live`];
  if (figures.accuracy !== null) facts.push(`${percent(figures.accuracy)} right, before ${percent(figures.accuracy_before ?? 0)}`);
  if (figures.agreement !== null) facts.push(`${percent(figures.agreement)} agree`);
  if (figures.deviation !== null) facts.push(`off by ${figures.deviation.toPrecision(2)} at most`);
  if (figures.latency_ms !== null) facts.push(`${durationText(figures.latency_ms)} (×${(figures.latency_ratio ?? 1).toFixed(2)})`);
  if (figures.memory_bytes) facts.push(bytes(figures.memory_bytes) + (figures.memory_ratio ? ` (×${figures.memory_ratio.toFixed(2)})` : ""));
  if (figures.num_faults) facts.push(`${plural(figures.num_faults, "fault")}`);
  return facts;
}

const wordOf = (state) => state.replace("_", " ");

function makeVersion({ number, state, source, weights, reason, facts }) {
  const level = LEVELS[state] ?? "idle";
  return h("li", { class: "worker", "data-level": level },
    h("header", {},
      h("b", {}, `Version ${number}`),
      h("span", { class: "quiet source" }, weights ? `${source} · ${weights}` : source),
      h("span", { class: "badge", "data-level": level }, wordOf(state))),
    reason ? h("p", { class: "reason" }, reason) : null,
    facts.length ? h("ul", { class: "facts" }, facts.map((fact) => h("li", {}, fact))) : null);
}

function makeStep({ time, version, state, reason }) {
  const what = version === null ? "The model" : `Version ${version}`;
  return h("li", { "data-level": LEVELS[state] ?? "idle" },
    h("time", { datetime: new Date(time * 1000).toISOString() }, timeOfDay(time)),
    h("span", {}, `${what}: ${wordOf(state)}${reason ? `, ${reason}` : ""}`));
}
