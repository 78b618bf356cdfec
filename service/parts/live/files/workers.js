// The workers of the chosen model, the ends of earlier ones of all models, and the GPUs of the host.

import { $, h, keep, setText } from "./dom.js";
import { age, bytes, number, plural, timeOfDay } from "./format.js";

const NUM_ENDINGS = 50;
const LEVELS = { ready: "good", starting: "idle", stalled: "warn", degraded: "warn", backoff: "warn", failed: "bad", stopped: "idle" };
const CAUSES = {
  asked: "Replaced", canary: "Failed its check", device: "Device fault", exit: "Exited",
  files: "Files changed", hang: "Hung", host: "Host lost", memory: "Out of memory",
  signal: "Killed", start: "Did not start",
};

/** Shows the workers of the version that serves, and then those of its other versions. */
export function showWorkers({ workers, other_workers: others }) {
  const ready = workers.filter((worker) => worker.state === "ready").length;
  setText($("workers-count"), workers.length ? `${ready} of ${workers.length} ready` : "");
  keep($("workers"), [...workers, ...others].map(shownOf), (worker) => worker.name, makeWorker);
}

/** What is shown of a worker, rounded, so that its element is left alone while that is the same. */
function shownOf(worker) {
  const facts = [worker.pid && `pid ${worker.pid}`, worker.rss_bytes && bytes(worker.rss_bytes)];
  if (worker.speed) facts.push(worker.speed);
  facts.push(worker.num_batches === 1 ? "1 batch" : `${number(worker.num_batches)} batches`);
  if (worker.last_answer_age_s !== null && worker.last_answer_age_s >= 10) facts.push(`last answer ${age(worker.last_answer_age_s)} ago`);
  if (worker.restarts) facts.push(`life ${worker.incarnation + 1}`);
  const ranks = worker.ranks.map((rank) => ({
    rank: rank.rank,
    device: [rank.device, rank.device_name].filter(Boolean).join(" "),
    holds: [bytes(rank.rss_bytes), rank.part].filter(Boolean).join(" · "),
  }));
  const { name, state, placement } = worker;
  const device = worker.host ? `${worker.host} ${worker.device}` : worker.device;
  const reason = state === "ready" ? "" : worker.reason;
  return { name, state, device, placement, reason, facts: facts.filter(Boolean), ranks };
}

function makeWorker(worker) {
  const how = worker.placement === "replicate" ? "" : ` · ${worker.placement}`;
  return h("li", { class: "worker", "data-level": LEVELS[worker.state] ?? "idle" },
    h("header", {},
      h("b", {}, worker.name),
      h("span", { class: "quiet" }, worker.device + how),
      h("span", { class: "badge", "data-level": LEVELS[worker.state] ?? "idle" }, worker.state)),
    worker.reason ? h("p", { class: "reason" }, worker.reason) : null,
    h("ul", { class: "facts" }, worker.facts.map((fact) => h("li", {}, fact))),
    worker.ranks.length
      ? h("ul", { class: "ranks", "aria-label": "Ranks" }, worker.ranks.map((rank) => h("li", {},
        h("b", {}, `rank ${rank.rank}`), h("span", {}, rank.device), h("span", {}, rank.holds))))
      : null);
}

/** Shows the latest ends of workers of all models, the newest first. */
export function showRestarts(models) {
  const all = Object.values(models).flatMap((model) => model.endings);
  const endings = all.sort((one, other) => other.time - one.time).slice(0, NUM_ENDINGS);
  setText($("restarts-count"), endings.length ? `latest ${endings.length}` : "");
  const shown = endings.length ? endings : [null];
  keep($("restarts"), shown, (ending) => (ending ? `${ending.worker}/${ending.incarnation}` : "none"), makeRestart);
}

export function showGpus(gpus) {
  $("gpus-part").hidden = !gpus.length;
  keep($("gpus"), gpus.map((gpu) => gpuShownOf(gpu)), (gpu) => gpu.uuid, makeGpu);
}

export function gpuShownOf({ index, uuid, name, up, memory_bytes: all, memory_used_bytes: used, utilization, ...rest }) {
  const facts = [
    utilization === null ? null : `${Math.round(utilization * 100)} % busy`,
    used === null ? bytes(all) : `${bytes(used)} of ${bytes(all)}`,
    rest.temperature_c === null ? null : `${Math.round(rest.temperature_c)} °C`,
    rest.power_w === null ? null : `${Math.round(rest.power_w)} W`,
  ];
  const errors = rest.xid_errors ? `${plural(rest.xid_errors, "Xid error")}, the last ${rest.last_xid}` : "";
  return {
    uuid, title: `GPU ${index}`, name, level: up ? (errors ? "warn" : "good") : "bad",
    badge: up ? "up" : "lost", facts: facts.filter(Boolean), reason: up ? errors : "The driver does not answer for it.",
  };
}

export function makeGpu({ title, name, level, badge, facts, reason }) {
  return h("li", { class: "worker", "data-level": level },
    h("header", {}, h("b", {}, title), h("span", { class: "quiet" }, name), h("span", { class: "badge", "data-level": level }, badge)),
    reason ? h("p", { class: "reason" }, reason) : null,
    h("ul", { class: "facts" }, facts.map((fact) => h("li", {}, fact))));
}

function makeRestart(ending) {
  if (ending === null) return h("li", { class: "quiet", "data-cause": "asked" }, "No worker has ended since the start.");
  return h("li", { "data-cause": ending.cause },
    h("div", { class: "head" },
      h("span", { class: "cause" }, CAUSES[ending.cause] ?? ending.cause),
      h("span", {}, `${ending.worker}, life ${ending.incarnation + 1}`),
      h("time", { datetime: new Date(ending.time * 1000).toISOString() }, timeOfDay(ending.time))),
    h("div", {}, ending.reason));
}
