// The head of the page: the service's state, and the figures of the chosen model.

import { $, h, keep, setText, showFacts } from "./dom.js";
import { age, bytes, duration, number, sum } from "./format.js";

const FEW = 10; // samples behind the figures, since single seconds jump

export function showSituation(situation) {
  $("status").dataset.level = situation.level;
  setText($("status"), situation.badge);
  const notice = $("notice");
  notice.hidden = !situation.title;
  notice.dataset.level = situation.noticeLevel ?? situation.level;
  setText($("notice-title"), situation.title ?? "");
  setText($("said"), situation.title ?? situation.badge); // aloud: not the numbers, which change
  setText($("notice-text"), situation.text ?? "");
  keep($("notice-list"), situation.list ?? [], (text) => text, (text) => h("li", {}, text));
  $("reconnect").hidden = !situation.canRetry;
}

export function showService(state) {
  setText($("version"), state.version);
  setText($("uptime"), `up ${age(state.uptime_s)}`);
  const { host, health } = state;
  const fronts = health.fronts.filter((front) => front.state === "up").length;
  showFacts($("host"), [
    ["Connections", number(host.connections)],
    ["Shared memory", `${bytes(host.arena_used_bytes)} of ${bytes(host.arena_bytes)}`],
    ["Front ends", `${fronts} of ${health.fronts.length} up`],
    ["Hosts", health.cluster_address === null ? "" : number(health.hosts.length)],
    ["Default model", state.default_model],
  ]);
}

export function showModel(health, sample) {
  const worker = health.workers.find((each) => each.state === "ready");
  const search = health.speed_search;
  const gain = worker?.speed_gain > 1.005 ? ` (×${worker.speed_gain.toFixed(2)})` : "";
  showFacts($("model-facts"), [
    ["version", health.versions.length > 1 ? health.version : ""],
    ["source", sample?.source],
    ["placement", health.workers[0]?.placement],
    ["speed", worker?.speed ? worker.speed + gain : ""],
    ["decoding", worker?.decode],
    ["batches of up to", sample ? number(sample.max_batch_size) : ""],
    ["speed search", search.state === "off" ? "" : search.text || search.state],
  ]);
}

export function showFigures(name, state, history) {
  const recent = history.slice(-FEW).map((moment) => moment.models[name]).filter(Boolean);
  const now = state.models[name];
  const workers = state.health.models.find((model) => model.name === name)?.workers ?? [];
  const ready = workers.filter((worker) => worker.state === "ready").length;
  const mean = (pick) => (recent.length ? sum(recent.map(pick)) / recent.length : 0);
  const answered = recent.filter((sample) => sample.latency_ms);
  const latency = answered.at(-1)?.latency_ms ?? null;
  const refused = mean((sample) => sum(Object.values(sample.rejected_per_s)));
  const failed = mean((sample) => sample.instances_per_s.failed);
  const sizes = sum(recent.map((sample) => sum(Object.values(sample.batch_sizes))));
  const batched = sum(recent.map((sample) => sample.num_batched));
  const figures = [
    figure("Throughput", number(mean((sample) => sample.instances_per_s.succeeded)), "/s",
      failed >= 0.01 ? `${number(failed)}/s failed` : "instances answered"),
    latency
      ? figure("Latency p50", ...duration(latency.p50), `p95 ${duration(latency.p95).join(" ")}`)
      : figure("Latency p50", "–", "", "no answers yet"),
    latency
      ? figure("Latency p99", ...duration(latency.p99), waitNote(answered.at(-1)))
      : figure("Latency p99", "–", "", "no answers yet"),
    figure("Queue", number(now?.queue_depth ?? 0), "", `of ${number(now?.queue_limit ?? 0)} · ${number(now?.in_flight ?? 0)} in flight`,
      now && now.queue_depth >= 0.8 * now.queue_limit ? "warn" : null),
    figure("Batch size", sizes ? number(batched / sizes) : "–", "", sizes ? "mean of instances" : "no batches yet"),
    figure("Refused", number(refused), "/s", refused ? mainReason(recent) : "nothing", refused ? "warn" : null),
    figure("Workers", `${ready}`, `of ${workers.length}`, workersNote(ready, workers, state.health),
      workersLevel(ready, workers)),
  ];
  keep($("figures"), figures, (item) => item.label, makeFigure);
}

function workersNote(ready, workers, health) {
  if (!workers.length) return isWithoutHosts(health) ? "no host is connected" : "no version serves";
  return ready === workers.length ? "all ready" : "not all ready";
}

/** Whether this is a cluster that no host has joined. */
export const isWithoutHosts = (health) => health.cluster_address !== null && !health.hosts.length;

function workersLevel(ready, workers) {
  if (ready === workers.length || workers.every((worker) => worker.state === "starting")) return null;
  return ready === 0 ? "bad" : "warn";
}

function figure(label, value, unit, note, level = null) {
  return { label, value, unit, note, level };
}

function makeFigure({ label, value, unit, note, level }) {
  return h("div", { class: "figure", "data-level": level },
    h("span", { class: "label" }, label),
    h("span", { class: "value" }, value, unit ? h("small", {}, unit) : null),
    h("span", { class: "note", title: note }, note));
}

function waitNote(sample) {
  return sample.queue_ms ? `p99 wait ${duration(sample.queue_ms.p99).join(" ")}` : "from head to answer";
}

function mainReason(recent) {
  const reasons = {};
  for (const sample of recent) {
    for (const [reason, rate] of Object.entries(sample.rejected_per_s)) reasons[reason] = (reasons[reason] ?? 0) + rate;
  }
  const [most] = Object.entries(reasons).sort(([, a], [, b]) => b - a);
  return most[0].replace("_", " ");
}
