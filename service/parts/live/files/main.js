// Puts the page together: the feed, what it shows of the chosen model, the theme and the keys.

import { redrawCharts, showCharts, startCharts } from "./charts.js";
import { $, setText } from "./dom.js";
import { Feed } from "./feed.js";
import { showHosts } from "./hosts.js";
import { showJobs } from "./jobs.js";
import { forgetKey, hasKey, setKey } from "./keys.js";
import { showModels, startModels } from "./models.js";
import { showFigures, showModel, showService, showSituation } from "./overview.js";
import { situationOf } from "./situation.js";
import { chooseModel, startTryIt } from "./tryit.js";
import { showVersions } from "./versions.js";
import { showGpus, showRestarts, showWorkers } from "./workers.js";

const NUM_KEPT = 300; // samples: as many as the service keeps

let state = null; // the newest event
let history = []; // the last minutes, the oldest first
let chosen = nameInUrl(); // the chosen model's name

const feed = new Feed({ onState, onLost, onRefused });

function onState(event) {
  const { history: past, ...now } = event;
  const newest = { time: now.time, models: now.models };
  history = (past.length ? past : [...history, newest]).slice(-NUM_KEPT);
  state = now;
  document.body.dataset.link = "live";
  $("key-form").hidden = true;
  $("metrics").hidden = hasKey("metrics"); // a link sends no key
  render();
}

function onLost(reason, pauseMs) {
  document.body.dataset.link = state === null ? "connecting" : "lost";
  const isDraining = state?.health.draining;
  showSituation({
    level: isDraining ? "warn" : "bad",
    badge: isDraining ? "Stopped" : "Disconnected",
    title: isDraining ? "The service has stopped." : "The service does not answer.",
    text: `${reason}; trying again in ${Math.ceil(pauseMs / 1000)} s.${state === null ? "" : " What is shown is old."}`,
    canRetry: true,
  });
}

function onRefused(problem) {
  document.body.dataset.link = state === null ? "locked" : "lost";
  showSituation({ level: "warn", badge: "Key needed" });
  forgetKey("metrics");
  if (problem.code === "forbidden" || $("key").value) setText($("key-text"), problem.detail);
  $("key").value = "";
  $("key-form").hidden = false;
  $("metrics").hidden = true;
  $("key").focus();
}

function render() {
  if (document.hidden) return;
  const names = state.health.models.map((model) => model.name);
  if (!names.includes(chosen)) chosen = names.includes(state.default_model) ? state.default_model : names[0] ?? "";
  showService(state);
  showGpus(state.health.gpus);
  showHosts(state.health);
  showJobs(state.jobs);
  showSituation(situationOf(state, history));
  showModels(state, history, chosen);
  setText($("model-name"), chosen);
  showRestarts(state.models);
  const model = state.health.models.find((each) => each.name === chosen);
  // The last model may have been removed, and others may come.
  for (const part of document.querySelectorAll(".model-bar, .figures, .columns")) part.hidden = !model;
  if (!model) return;
  showModel(model, state.models[chosen]);
  showFigures(chosen, state, history);
  showWorkers(model);
  showVersions(model, state.changes);
  chooseModel(model);
  showCharts(chosen, history);
}

function nameInUrl() {
  try {
    return decodeURIComponent(location.hash.slice(1));
  } catch {
    return ""; // a link that was cut off
  }
}

function choose(name) {
  chosen = name;
  window.history.replaceState(null, "", `#${encodeURIComponent(name)}`);
  if (state !== null) render();
}

const THEMES = ["auto", "light", "dark"];

function showTheme() {
  setText($("theme"), `Theme: ${document.documentElement.dataset.theme ?? "auto"}`);
}

function turnTheme() {
  const root = document.documentElement;
  const next = THEMES[(THEMES.indexOf(root.dataset.theme ?? "auto") + 1) % THEMES.length];
  if (next === "auto") delete root.dataset.theme;
  else root.dataset.theme = next;
  localStorage.setItem("inferpool.theme", next);
  showTheme();
  redrawCharts();
}

$("theme").addEventListener("click", turnTheme);
$("reconnect").addEventListener("click", () => feed.start());
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey("metrics", $("key").value.trim());
  feed.start();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawCharts);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && state !== null && document.body.dataset.link === "live") render();
});
addEventListener("hashchange", () => choose(nameInUrl()));

showTheme();
startModels(choose);
startTryIt();
startCharts();
feed.start();
