// The hosts of a cluster, those that were lost lately, and the GPUs of each.

import { $, h, keep, setText } from "./dom.js";
import { age, bytes, durationText, plural } from "./format.js";
import { gpuShownOf, makeGpu } from "./workers.js";

const FAR_OFF_S = 0.5; // of a clock, from which on it is worth a word

export function showHosts({ cluster_address: address, standby, hosts, lost_hosts: lost }) {
  $("hosts-part").hidden = address === null;
  const silent = hosts.filter((host) => host.state !== "connected").length;
  const count = silent ? `${silent} of ${hosts.length} silent` : `${hosts.length} connected`;
  setText($("hosts-count"), hosts.length ? count : standby || `none has joined at ${address}`);
  keep($("hosts"), [...hosts.map(shownOf), ...lost.map(lostShownOf)], (host) => host.name, makeHost);
}

/** What is shown of a host, rounded, so that its element is left alone while that is the same. */
function shownOf(host) {
  const facts = [`${host.workers_ready} of ${plural(host.workers, "worker")} ready`, ...host.devices];
  if (host.round_trip_s !== null) facts.push(`round trip ${durationText(host.round_trip_s * 1000)}`);
  if (host.arena_bytes) facts.push(`${bytes(host.arena_used_bytes)} of ${bytes(host.arena_bytes)} shared`);
  facts.push(`version ${host.version}`, `joined ${age(host.connected_s)} ago`);
  const offset = host.clock_offset_s ?? 0;
  const reasons = [];
  if (host.state === "silent") reasons.push("No sign of life for longer than usual.");
  if (Math.abs(offset) >= FAR_OFF_S) reasons.push(`Its clock is ${Math.abs(offset).toFixed(1)} s ${offset > 0 ? "ahead" : "behind"}.`);
  return {
    name: host.name, address: host.address, state: host.state, level: host.state === "connected" ? "good" : "warn",
    reason: reasons.join(" "), facts, gpus: host.gpus.map(gpuShownOf),
  };
}

function lostShownOf({ name, address, state, reason, age_s: ago }) {
  return { name, address, state, level: state === "left" ? "idle" : "bad", reason, facts: [`${age(ago)} ago`], gpus: [] };
}

function makeHost({ name, address, state, level, reason, facts, gpus }) {
  return h("li", { class: "worker", "data-level": level },
    h("header", {},
      h("b", {}, name),
      h("span", { class: "quiet" }, address),
      h("span", { class: "badge", "data-level": level }, state)),
    reason ? h("p", { class: "reason" }, reason) : null,
    h("ul", { class: "facts" }, facts.map((fact) => h("li", {}, fact))),
    gpus.length ? h("ul", { class: "gpus-of", "aria-label": "GPUs" }, gpus.map(makeGpu)) : null);
}
