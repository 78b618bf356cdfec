// The jobs of the store in numbers, and the latest ones of this tab's key, with their progress.

import { $, h, keep, setText, showFacts } from "./dom.js";
import { age, bytes, number, plural, sum, timeOfDay } from "./format.js";
import { keyHeaders, setKey } from "./keys.js";
import { problemOf, showProblem } from "./result.js";

const NUM_SHOWN = 8;
const EVERY_MS = 2000;
const FEW = 10; // events behind the rate, since answers are kept in batches
const LEVELS = { queued: "idle", running: "good", succeeded: "good", failed: "bad", cancelled: "idle" };

const count = (value) => value.toLocaleString("en");

let rates = [];
let askedAt = -Infinity;
let isAsking = false;
let isLocked = false; // no key that was given may see jobs

/** Shows the `jobs` of an event, and asks for the latest jobs now and then; null hides all. */
export function showJobs(jobs) {
  $("jobs-part").hidden = jobs === null;
  if (jobs === null) return;
  rates = [...rates, jobs.instances_per_s].slice(-FEW);
  const rate = sum(rates) / rates.length;
  const states = Object.entries(jobs.by_state);
  setText($("jobs-count"), jobs.open ? plural(sum(Object.values(jobs.by_state)), "job") : "their store is not open");
  showFacts($("jobs-facts"), [
    ...states.map(([state, num]) => [state, count(num)]),
    ["instances waiting", jobs.instances_waiting ? count(jobs.instances_waiting) : ""],
    ["answered", rate ? `${number(rate)}/s` : ""],
    ["store", jobs.store_bytes ? bytes(jobs.store_bytes) : ""],
  ]);
  if (!states.length) keep($("jobs"), [], (job) => job.id, makeJob);
  else if (jobs.open && !isLocked && performance.now() - askedAt >= EVERY_MS) load();
}

async function load() {
  if (isAsking) return;
  [isAsking, askedAt] = [true, performance.now()];
  try {
    const response = await fetch(`jobs?limit=${NUM_SHOWN}`, { headers: keyHeaders("predict"), cache: "no-store" });
    if (await isRefused(response) || !response.ok) return;
    const { jobs } = await response.json();
    keep($("jobs"), jobs.map(shownOf), (job) => job.id, makeJob);
    for (const job of jobs) showProgress(job);
  } catch {
    // The feed tells that the service is gone.
  } finally {
    isAsking = false;
  }
}

/** Whether an answer says that the key may not do this; then another one is asked for. */
async function isRefused(response) {
  isLocked = response.status === 401 || response.status === 403;
  if (isLocked) showProblem($("jobs-problem"), problemOf(await response.text(), response), takeKey);
  else $("jobs-problem").replaceChildren();
  return isLocked;
}

function takeKey(key) {
  setKey("predict", key);
  load();
}

/** What is shown of a job apart from its progress: the element stays while that goes on. */
const shownOf = ({ id, state, model, versions, created_at, error }) => ({ id, state, model, versions, created_at, error });

function makeJob({ id, state, model, versions, created_at: createdAt, error }) {
  const isOver = state !== "queued" && state !== "running";
  const by = versions.length ? `${model} · version ${versions.join(", ")}` : model;
  return h("li", { class: "worker", "data-level": LEVELS[state] },
    h("header", {}, h("b", {}, id), h("span", { class: "quiet" }, by), h("span", { class: "badge", "data-level": LEVELS[state] }, state)),
    h("div", { class: "track", "aria-hidden": "true" }, h("span", { class: "fill" })),
    error ? h("p", { class: "reason" }, error.message) : null,
    h("div", { class: "row" },
      h("span", { class: "progress" }),
      h("time", { class: "quiet", datetime: new Date(createdAt * 1000).toISOString() }, `accepted at ${timeOfDay(createdAt)}`),
      isOver ? resultLink(id) : cancelButton(id)));
}

function showProgress({ id, num_done: done, num_failed: failed, num_instances: all, started_at: began, ended_at: ended }) {
  const item = [...$("jobs").children].find((each) => each.dataset.key === id);
  const took = began !== null && ended !== null ? ` in ${age(ended - began)}` : "";
  const lost = failed ? `, ${count(failed)} failed` : "";
  setText(item.querySelector(".progress"), `${count(done)} of ${plural(all, "instance")}${took}${lost}`);
  item.querySelector(".fill").style.setProperty("--share", `${all ? (100 * done) / all : 0}%`);
}

/** A link to the result; with a key, which no link sends, it is fetched and then saved. */
function resultLink(id) {
  const link = h("a", { href: `jobs/${encodeURIComponent(id)}/result`, target: "_blank", rel: "noopener" }, "Result");
  link.addEventListener("click", async (event) => {
    const headers = keyHeaders("predict");
    if (!headers.Authorization) return;
    event.preventDefault();
    const response = await fetch(link.href, { headers });
    if (await isRefused(response) || !response.ok) return;
    const url = URL.createObjectURL(await response.blob());
    h("a", { href: url, download: `${id}.json` }).click();
    URL.revokeObjectURL(url);
  });
  return link;
}

function cancelButton(id) {
  const button = h("button", { type: "button", "aria-label": `Cancel ${id}` }, "Cancel");
  button.addEventListener("click", async () => {
    button.disabled = true;
    await fetch(`jobs/${encodeURIComponent(id)}`, { method: "DELETE", headers: keyHeaders("predict") }).catch(() => null);
    button.disabled = false;
    load();
  });
  return button;
}
