// The charts of the chosen model. plotly.js draws them; it loads after the page.

import { $, h, keep, setText } from "./dom.js";
import { durationText, number, sum } from "./format.js";

const SPAN_S = 300;
const GAP_S = 3; // between samples; more means that some are missing
const ENDS = [
  ["answered", "--series-1", (sample) => sample.instances_per_s.succeeded],
  ["failed", "--bad", (sample) => sample.instances_per_s.failed],
  ["expired", "--warn", (sample) => sample.instances_per_s.expired],
  ["cancelled", "--series-4", (sample) => sample.instances_per_s.cancelled],
  ["refused", "--series-2", (sample) => sum(Object.values(sample.rejected_per_s))],
];

const PERCENTILES = [["p50", "--series-1"], ["p95", "--series-2"], ["p99", "--series-3"]];

const CHARTS = [
  { id: "latency", title: "Latency", draw: latency },
  { id: "throughput", title: "Instances per second", draw: throughput },
  { id: "depth", title: "Queue and in flight", draw: depth },
  { id: "sizes", title: "Batches by size", draw: sizes },
];

let library = null; // plotly.js, once it is there
let last = null;

/** Builds the frames, and has the library loaded. */
export function startCharts() {
  $("charts").replaceChildren(...CHARTS.map(frame));
  const script = h("script", { src: "page/plotly.min.js" });
  script.async = true;
  script.addEventListener("load", () => {
    library = globalThis.Plotly;
    redrawCharts();
    const resized = new ResizeObserver((entries) => {
      for (const { target } of entries) if (target.data) library.Plots.resize(target);
    });
    for (const chart of CHARTS) resized.observe($(`${chart.id}-plot`));
  });
  script.addEventListener("error", () => {
    for (const chart of CHARTS) {
      setText($(`${chart.id}-none`), "The charts could not be loaded.");
    }
  });
  document.head.append(script);
}

export function showCharts(name, history) {
  last = { name, moments: history };
  redrawCharts();
}

/** Draws again what was shown last, as after a change of the theme. */
export function redrawCharts() {
  if (last === null || document.hidden) return;
  const { name, moments } = last;
  const samples = withGaps(moments, name);
  for (const chart of CHARTS) {
    const { traces, layout, keys, text, isEmpty } = chart.draw(samples);
    keep($(`${chart.id}-keys`), isEmpty ? [] : keys, ([name]) => name, makeKey);
    $(`${chart.id}-chart`).toggleAttribute("data-empty", isEmpty);
    const none = $(`${chart.id}-none`);
    none.hidden = !isEmpty && library !== null;
    if (library !== null) setText(none, EMPTY[chart.id]);
    setText($(`${chart.id}-text`), isEmpty ? `${EMPTY[chart.id]}.` : text);
    if (library === null) continue;
    library.react($(`${chart.id}-plot`), traces, { ...baseLayout(samples), ...layout }, CONFIG);
  }
}

const EMPTY = {
  latency: "No answers in the last five minutes",
  throughput: "No requests in the last five minutes",
  depth: "Nothing has waited in the last five minutes",
  sizes: "No batches in the last five minutes",
};

const CONFIG = { displayModeBar: false, scrollZoom: false, doubleClick: false, showTips: false };

function frame({ id, title }) {
  return h("figure", { class: "chart", id: `${id}-chart`, "aria-labelledby": `${id}-title`, "aria-describedby": `${id}-text` },
    h("header", {}, h("h3", { id: `${id}-title` }, title), h("div", { class: "keys", id: `${id}-keys`, "aria-hidden": "true" })),
    h("div", { class: "plot", id: `${id}-plot`, "aria-hidden": "true" }),
    h("div", { class: "none", id: `${id}-none`, "aria-hidden": "true" }, "Loading the chart"),
    h("figcaption", { class: "hidden", id: `${id}-text` }));
}

function makeKey([name, color]) {
  const key = h("span", {}, name);
  key.style.setProperty("--key", `var(${color})`);
  return key;
}

/** The samples of a model, with null where some are missing, so that no line bridges the gap. */
function withGaps(moments, name) {
  const samples = [];
  let before = null;
  for (const { time, models } of moments) {
    const sample = models[name];
    if (!sample) continue;
    if (before !== null && time - before > GAP_S) samples.push({ at: new Date((before + 1) * 1000), sample: null });
    samples.push({ at: new Date(time * 1000), sample });
    before = time;
  }
  return samples;
}

function line(samples, name, color, pick, extra = {}) {
  return {
    x: samples.map(({ at }) => at),
    y: samples.map(({ sample }) => (sample === null ? null : pick(sample))),
    name, mode: "lines", type: "scatter", connectgaps: false,
    line: { color: colorOf(color), width: 1.5, ...extra.line },
    hovertemplate: "%{y:.3~r}",
    ...extra.trace,
  };
}

function latency(samples) {
  // A single answer makes no line, so few answers get markers.
  const answered = samples.filter(({ sample }) => sample?.latency_ms);
  const mode = answered.length * 2 < samples.length ? "lines+markers" : "lines";
  const newest = answered.at(-1)?.sample.latency_ms;
  const worst = answered.length ? Math.max(...answered.map(({ sample }) => sample.latency_ms.p99)) : 0;
  const [unit, unitMs] = worst >= 1500 ? ["s", 1000] : ["ms", 1];
  const traces = PERCENTILES.toReversed().map(([name, color]) =>
    line(samples, name, color, (sample) => (sample.latency_ms ? sample.latency_ms[name] / unitMs : null),
      { trace: { mode, marker: { size: 3 }, hovertemplate: `%{y:.3~r} ${unit}` } }));
  return {
    traces,
    layout: { yaxis: axis({ ticksuffix: ` ${unit}` }) },
    keys: PERCENTILES,
    isEmpty: !newest,
    text: newest && `Latency now: p50 ${durationText(newest.p50)}, p95 ${durationText(newest.p95)}, p99 ${durationText(newest.p99)}; highest p99 in five minutes ${durationText(worst)}.`,
  };
}

function throughput(samples) {
  const there = samples.filter(({ sample }) => sample).map(({ sample }) => sample);
  const used = ENDS.filter(([name, , pick]) => name === "answered" || there.some((sample) => pick(sample) > 0));
  const traces = used.map(([name, color, pick]) => line(samples, name, color, pick, {
    line: { width: name === "answered" ? 1.5 : 0 }, // or it would lie on the one below
    trace: { stackgroup: "all", mode: "lines", fillcolor: colorOf(color, name === "answered" ? 0.25 : 0.6) },
  }));
  const now = (name) => number(there.length ? ENDS.find(([each]) => each === name)[2](there.at(-1)) : 0);
  const most = Math.max(0, ...there.map((sample) => sample.instances_per_s.succeeded));
  return {
    traces,
    layout: {},
    keys: used.map(([name, color]) => [name, color]),
    isEmpty: !there.some((sample) => ENDS.some(([, , pick]) => pick(sample) > 0)),
    text: `Answered per second now: ${now("answered")}; at most ${number(most)} in five minutes; refused now: ${now("refused")}.`,
  };
}

function depth(samples) {
  const there = samples.filter(({ sample }) => sample);
  const deepest = Math.max(0, ...there.map(({ sample }) => sample.queue_depth));
  const most = Math.max(0, ...there.map(({ sample }) => sample.in_flight));
  return {
    traces: [
      line(samples, "in flight", "--series-1", (sample) => sample.in_flight),
      line(samples, "waiting", "--series-3", (sample) => sample.queue_depth,
        { trace: { fill: "tozeroy", fillcolor: colorOf("--series-3", 0.2) } }),
    ],
    layout: {},
    keys: [["waiting", "--series-3"], ["in flight", "--series-1"]],
    isEmpty: !there.some(({ sample }) => sample.in_flight || sample.instances_per_s.accepted),
    text: `Waiting now: ${number(there.at(-1)?.sample.queue_depth ?? 0)}; at most ${number(deepest)} waiting and ${number(most)} in flight in five minutes.`,
  };
}

function sizes(samples) {
  const counts = new Map();
  for (const { sample } of samples) {
    for (const [edge, count] of Object.entries(sample?.batch_sizes ?? {})) counts.set(edge, (counts.get(edge) ?? 0) + count);
  }
  const edges = ["1", "2", "4", "8", "16", "32", "64", "128", "256", "+Inf"];
  const used = edges.slice(0, 1 + Math.max(3, ...[...counts.keys()].map((edge) => edges.indexOf(edge))));
  const names = used.map((edge) => sizeName(edge));
  const most = [...counts].sort(([, a], [, b]) => b - a)[0];
  return {
    traces: [{
      type: "bar", x: names, y: used.map((edge) => counts.get(edge) ?? 0),
      marker: { color: colorOf("--series-1", 0.75) }, hovertemplate: "%{y:,} batches of %{x}<extra></extra>",
    }],
    layout: { xaxis: { ...axis({ type: "category", showgrid: false, tickformatstops: [] }) }, bargap: 0.25, hovermode: "closest" },
    keys: [["in five minutes", "--series-1"]],
    isEmpty: counts.size === 0,
    text: most && `${number(sum([...counts.values()]))} batches in five minutes; most had ${sizeName(most[0])} ${most[0] === "1" ? "instance" : "instances"}.`,
  };
}

function sizeName(edge) {
  if (edge === "+Inf") return "over 256";
  return Number(edge) > 2 ? `${Number(edge) / 2 + 1}–${edge}` : edge;
}

function baseLayout(samples) {
  const until = samples.at(-1)?.at ?? new Date();
  return {
    margin: { l: 44, r: 8, t: 8, b: 26 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 11, color: colorOf("--quiet") },
    showlegend: false, hovermode: "x unified", dragmode: false,
    hoverlabel: { bgcolor: colorOf("--surface"), bordercolor: colorOf("--line"), font: { color: colorOf("--text") } },
    xaxis: { ...axis({ type: "date", tickformatstops: [], tickformat: "%H:%M", hoverformat: "%H:%M:%S", nticks: 6, showgrid: false }), range: [new Date(until - SPAN_S * 1000), until] },
    yaxis: axis({}),
  };
}

function axis(more) {
  return {
    fixedrange: true, rangemode: "tozero", zeroline: false, gridcolor: colorOf("--grid"),
    linecolor: colorOf("--line"), nticks: 5, tickformatstops: TICKS, automargin: true, ...more,
  };
}

// The format depends on the distance of the ticks: 0.25, then 1,500, then 20k.
const TICKS = [
  { dtickrange: [null, 0.999], value: ".2~f" },
  { dtickrange: [0.999, 999], value: ",~f" },
  { dtickrange: [999, null], value: "~s" },
];

const probe = document.body.appendChild(h("span", { class: "hidden", "aria-hidden": "true" }));

/** A colour of the style sheet as it is now, since plotly.js knows no variables. */
function colorOf(variable, alpha = 1) {
  probe.style.color = `var(${variable})`;
  const [red, green, blue] = getComputedStyle(probe).color.match(/[\d.]+/g);
  return `rgba(${red},${green},${blue},${alpha})`;
}
