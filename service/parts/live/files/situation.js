// Sums up the service's state: one badge, and a notice if something is wrong.

import { number, plural, sum } from "./format.js";
import { isWithoutHosts } from "./overview.js";

const NEAR_FULL = 0.8; // of the queue
const RECENT = 5; // samples in which something was refused

const REASONS = {
  queue_full: "the queue is full",
  arena_full: "the shared memory for payloads is full",
  key_share: "their API key had its share of the queue or of the shared memory",
  deadline: "their deadlines could not be met",
  objective: "they would have been later than the objective allows",
  draining: "the service is draining",
  unavailable: "no worker was ready",
  quarantined: "workers died of these inputs before",
};

/** {level, badge, title, text, list}; without a title there is nothing to tell. */
export function situationOf(state, history) {
  const { health, models } = state;
  const workers = health.models.flatMap((model) => model.workers);
  const ofModels = (concerned, text) => titled(health.models, concerned, text);
  if (health.draining) {
    const left = sum(Object.values(models).map((model) => model.in_flight));
    return {
      level: "warn", badge: "Draining", title: "Draining.",
      text: `Nothing new should be sent here; ${plural(left, "instance")} still to be answered.`,
    };
  }
  if (!health.models.length) {
    return {
      level: "warn", badge: "No models", title: "No models are served.",
      text: "Requests get 404 until one is added.",
    };
  }
  if (health.standby) {
    return { level: "idle", badge: "Standby", title: "Another front end serves.", text: `This one is ${health.standby}.` };
  }
  if (isWithoutHosts(health)) {
    return {
      level: "bad", badge: "No hosts", title: "No host is connected.",
      text: `Requests are turned away until an agent joins at ${health.cluster_address}.`,
      list: reasonsOfHosts(health.lost_hosts),
    };
  }
  const lost = health.models.filter((model) => model.workers.length
    && model.workers.every((worker) => worker.state === "failed"));
  if (lost.length) {
    return {
      level: "bad", badge: lost.length === health.models.length ? "Failed" : "Degraded",
      title: `${listed(lost.map((model) => model.name))} cannot be served.`,
      text: "Every worker was given up: fix the cause, then have it tried again by SIGUSR2 to the service, or restart the model with an admin key.",
      list: lost.flatMap((model) => reasonsOf(model.workers)),
    };
  }
  const waiting = workers.filter(isStarting);
  if (health.status === "starting") {
    return {
      level: "idle", badge: "Starting",
      title: ofModels(health.models.filter((model) => model.workers.some(isStarting)), "Starting."),
      text: `${plural(waiting.length, "worker")} of ${workers.length} still to come up.`,
      list: reasonsOf(waiting),
    };
  }
  const down = workers.filter((worker) => !isReady(worker));
  if (health.status === "unavailable") {
    return {
      level: "bad", badge: "Unavailable",
      title: ofModels(health.models.filter((model) => !model.workers.some(isReady)), "Requests are turned away."),
      text: "No worker takes batches; they are tried again with growing pauses.",
      list: reasonsOf(down),
    };
  }
  const overloaded = overloadOf(models, history);
  if (overloaded) return overloaded;
  if (down.length) {
    const concerned = health.models.filter((model) => !model.workers.every(isReady));
    const theirs = concerned.flatMap((model) => model.workers);
    return {
      level: "warn", badge: "Degraded",
      title: ofModels(concerned, `${plural(down.length, "worker")} of ${theirs.length} not ready.`),
      text: "The others go on.",
      list: reasonsOf(down),
    };
  }
  const gone = health.lost_hosts.filter((host) => host.state === "lost");
  if (gone.length) {
    return {
      level: "good", badge: "Ready", noticeLevel: "warn",
      title: `${plural(gone.length, "host")} lost in the last ten minutes.`,
      text: "The others do its work.",
      list: reasonsOfHosts(gone),
    };
  }
  const quarantined = sum(Object.values(models).map((model) => model.quarantined));
  if (quarantined) {
    return {
      level: "good", badge: "Ready", noticeLevel: "warn",
      title: ofModels(health.models.filter((model) => models[model.name]?.quarantined), `${plural(quarantined, "input")} in quarantine.`),
      text: "Workers died of them, so they are refused for a while.",
    };
  }
  return { level: "good", badge: "Ready" };
}

const isReady = (worker) => worker.state === "ready";
const isStarting = (worker) => worker.state === "starting";

/** A title that names the models which it concerns, if there are others too. */
function titled(all, concerned, text) {
  if (all.length < 2 || !concerned.length) return text;
  return `${listed(concerned.map((model) => model.name))}: ${text[0].toLowerCase()}${text.slice(1)}`;
}

/** Whether much more comes than can be computed, and how that shows. */
function overloadOf(models, history) {
  for (const [name, model] of Object.entries(models)) {
    const refused = {};
    for (const moment of history.slice(-RECENT)) {
      for (const [reason, rate] of Object.entries(moment.models[name]?.rejected_per_s ?? {})) {
        if (reason !== "draining" && reason !== "quarantined") refused[reason] = (refused[reason] ?? 0) + rate / RECENT;
      }
    }
    const [worst] = Object.entries(refused).sort(([, a], [, b]) => b - a);
    const isNearFull = model.queue_depth >= NEAR_FULL * model.queue_limit;
    if (!worst && !isNearFull) continue;
    const waits = `${number(model.queue_depth)} of ${number(model.queue_limit)} places in the queue are taken.`;
    return {
      level: "warn", badge: "Overloaded", title: `${name} is overloaded.`,
      text: worst ? `Some requests are refused: ${REASONS[worst[0]] ?? worst[0]}. ${waits}` : waits,
    };
  }
  return null;
}

const reasonsOfHosts = (hosts) => hosts.slice(0, 6).map((host) => `${host.name}: ${host.reason}`);

/** A line for each reason, with the workers that it keeps away. */
function reasonsOf(workers) {
  const names = new Map();
  for (const worker of workers) {
    const reason = worker.reason || worker.state;
    names.set(reason, [...(names.get(reason) ?? []), worker.name]);
  }
  return [...names].slice(0, 6).map(([reason, those]) => `${listed(those)}: ${reason}`);
}

function listed(names) {
  const [first, ...others] = names;
  return others.length < 3 ? names.join(", ") : `${first} and ${plural(others.length, "other")}`;
}
