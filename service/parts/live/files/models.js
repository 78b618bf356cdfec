// The overview of several models: a card for each, which chooses it.

import { $, h, keep } from "./dom.js";
import { durationText, number, sum } from "./format.js";

const FEW = 10; // samples behind the figures, since single seconds jump

let onChoice = null;

export function startModels(choose) {
  onChoice = choose;
}

/** Shows what each model does; nothing if there is only one, which the rest of the page shows. */
export function showModels({ health, models }, history, chosen) {
  $("models").hidden = health.models.length < 2;
  const shown = health.models.length < 2 ? [] : health.models.map((model) => shownOf(model, models[model.name], history, chosen));
  keep($("models"), shown, (model) => model.name, makeModel);
}

function shownOf({ name, ready, reason, change, workers }, now, history, chosen) {
  const recent = history.slice(-FEW).map((moment) => moment.models[name]).filter(Boolean);
  const mean = (pick) => (recent.length ? sum(recent.map(pick)) / recent.length : 0);
  const refused = mean((sample) => sum(Object.values(sample.rejected_per_s)));
  const failed = mean((sample) => sample.instances_per_s.failed);
  const latency = recent.findLast((sample) => sample.latency_ms)?.latency_ms;
  const [level, badge] = stateOf(workers, ready);
  const facts = [
    ["workers", `${workers.filter((worker) => worker.state === "ready").length} of ${workers.length}`],
    ["answers", `${number(mean((sample) => sample.instances_per_s.succeeded))}/s`],
    ["p99", latency ? durationText(latency.p99) : ""],
    ["queue", number(now?.queue_depth ?? 0)],
    ["failed", failed >= 0.01 ? `${number(failed)}/s` : ""],
    ["refused", refused >= 0.01 ? `${number(refused)}/s` : ""],
    ["restarts", now?.endings.length ? number(now.endings.length) : ""],
  ];
  return {
    name, level, badge, facts: facts.filter(([, value]) => value), isChosen: name === chosen,
    reason: change || (ready ? "" : reason),
  };
}

function stateOf(workers, ready) {
  const has = (state) => workers.some((worker) => worker.state === state);
  if (ready) return workers.every((worker) => worker.state === "ready") ? ["good", "ready"] : ["warn", "degraded"];
  if (!workers.length || has("starting")) return ["idle", workers.length ? "starting" : "not loaded"];
  return ["bad", workers.every((worker) => worker.state === "failed") ? "failed" : "unavailable"];
}

function makeModel({ name, level, badge, facts, isChosen, reason }) {
  const link = h("a", { href: `#${encodeURIComponent(name)}`, "aria-current": isChosen ? "true" : null },
    h("header", {}, h("b", {}, name), h("span", { class: "badge", "data-level": level }, badge)),
    reason ? h("p", { class: "reason" }, reason) : null,
    h("ul", { class: "facts" }, facts.map(([what, value]) => h("li", {}, `${what} `, h("b", {}, value)))));
  link.addEventListener("click", (event) => {
    event.preventDefault(); // which would scroll to a part of the page that has the model's name
    onChoice(name);
  });
  return h("li", { class: "worker", "data-level": level }, link);
}
