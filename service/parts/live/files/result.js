// Shows the result of a prediction: labels or JSON, its timing, or why it failed.

import { h } from "./dom.js";
import { foundElements, isFound } from "./found.js";
import { durationText, json } from "./format.js";

const MAX_LABELS = 5;
const MAX_FAILURES = 3; // of several instances, shown at once; the others unfold
const MAX_TEXT = 20_000;
const RASTER = new Set(["apng", "avif", "bmp", "gif", "jpeg", "png", "webp"].map((each) => `image/${each}`));
const PARTS = [
  ["queue", "queue"],
  ["preprocess", "preparing"],
  ["inference", "inference"],
  ["rest", "rest of the service"],
  ["network", "network and browser"],
];

/** Shows a body of /predict with what its headers say, and what was found in the picture that was sent. */
export function showAnswer(place, { predictions }, headers, tookMs, picture = null) {
  const failures = predictions.flatMap((each, index) => (isFailure(each) ? [{ index, ...each.error }] : []));
  const times = timesOf(headers.get("server-timing"), tookMs);
  place.replaceChildren(
    ...(failures.length ? [problem({ title: `${failures.length} of ${predictions.length} instances failed`, errors: failures })] : []),
    ...prediction(predictions, picture, place.clientWidth),
    ...(times ? [h("h3", {}, "Where its time went"), ...timeline(times)] : []),
  );
}

/** Shows a problem document (RFC 9457); with `onKey`, asks for a key as well. */
export function showProblem(place, document, onKey = null) {
  place.replaceChildren(problem(document), ...(onKey ? [keyForm(onKey)] : []));
}

/** The problem document of an answer that has failed. */
export function problemOf(text, response) {
  try {
    return { ...JSON.parse(text), retryAfter: response.headers.get("retry-after") };
  } catch {
    return { title: `Status ${response.status}`, detail: text.slice(0, 500) };
  }
}

function problem({ title, detail, code, status, request_id: id, retryAfter, errors = [] }) {
  const facts = [code && `code ${code}`, status && `status ${status}`, id && `request ${id}`, retryAfter && `try again in ${retryAfter} s`];
  const rest = errors.slice(MAX_FAILURES);
  return h("div", { class: "problem", role: "alert" },
    h("strong", {}, title ?? "The prediction failed"), errors.length ? failureList(errors.slice(0, MAX_FAILURES)) : h("p", {}, detail ?? ""),
    rest.length ? h("details", {}, h("summary", {}, `and ${rest.length.toLocaleString("en")} more`), failureList(rest)) : null,
    h("ul", { class: "facts" }, facts.filter(Boolean).map((fact) => h("li", {}, fact))));
}

const isFailure = (value) => typeof value?.error?.code === "string" && typeof value.error.status === "number";

/** What went wrong with each of several instances. */
const failureList = (errors) => h("ul", { class: "failures" },
  errors.map(({ index, message, code }) => h("li", {}, h("b", {}, `instances[${index}]`), ` ${message} `, h("span", { class: "code" }, code))));

function keyForm(onKey) {
  const input = h("input", { type: "password", autocomplete: "off", "aria-label": "Key for predictions", placeholder: "Key for predictions", required: "" });
  const form = h("form", { class: "row" }, input, h("button", { type: "submit" }, "Use key"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    onKey(input.value.trim());
  });
  return form;
}

function prediction(predictions, picture, width) {
  const [first] = predictions;
  if (predictions.length === 1 && isLabels(first)) {
    return [h("h3", {}, "Prediction"), h("ol", { class: "labels" }, first.slice(0, MAX_LABELS).map(labelled))];
  }
  if (predictions.length === 1 && isContent(first)) {
    return [h("h3", {}, "Prediction"), ...contentElements(first)];
  }
  if (predictions.length === 1 && isFound(first)) {
    const details = h("details", {}, h("summary", {}, "JSON"), asText(first));
    return [h("h3", {}, "Prediction"), ...foundElements(first, picture, width), details];
  }
  return [h("h3", {}, "Prediction"), asText(predictions.length === 1 ? first : predictions)];
}

function asText(value) {
  const text = json(value);
  const shown = text.length > MAX_TEXT ? `${text.slice(0, MAX_TEXT)} … (${text.length.toLocaleString("en")} characters)` : text;
  return h("pre", { tabindex: "0" }, shown);
}

const isContent = (value) => typeof value?.b64 === "string" && typeof value.media_type === "string"
  && Object.keys(value).length === 2;

/** A picture that can hold no script, drawn; or a link that saves what the answer holds. */
function contentElements({ b64, media_type: type }) {
  const blob = new Blob([Uint8Array.from(atob(b64), (char) => char.charCodeAt(0))], { type: "application/octet-stream" });
  const about = `${type.slice(0, 100)}, ${blob.size.toLocaleString("en")} bytes`;
  const link = h("a", { href: URL.createObjectURL(blob), download: "answer" }, "Save it");
  const canvas = h("canvas", { class: "found", role: "img", hidden: "", "aria-label": `Picture in the answer: ${about}` });
  if (RASTER.has(type.split(";")[0].trim().toLowerCase())) drawContent(canvas, blob);
  return [canvas, h("p", { class: "quiet" }, `${about}. `, link)];
}

async function drawContent(canvas, blob) {
  try {
    const picture = await createImageBitmap(blob);
    canvas.width = picture.width;
    canvas.height = picture.height;
    canvas.getContext("2d").drawImage(picture, 0, 0);
    canvas.hidden = false;
  } catch {
    // The browser knows no such picture; the link saves it.
  }
}

const isLabels = (value) => Array.isArray(value) && value.length > 0
  && value.every((each) => typeof each?.label === "string" && typeof each?.score === "number");

function labelled({ label, score }) {
  const fill = h("span", { class: "fill" });
  fill.style.setProperty("--share", `${Math.min(100, Math.max(0, score * 100))}%`);
  return h("li", {}, h("span", {}, label), h("span", {}, `${(score * 100).toFixed(1)} %`), h("div", { class: "track", "aria-hidden": "true" }, fill));
}

/** Milliseconds by part, from a Server-Timing header (W3C) and what the browser measured. */
export function timesOf(header, tookMs) {
  if (!header) return null;
  const given = {};
  for (const metric of header.split(",")) {
    const match = /^\s*([^;\s]+).*;\s*dur=([\d.]+)/.exec(metric);
    if (match) given[match[1]] = Number(match[2]);
  }
  const { queue = 0, preprocess = 0, inference = 0 } = given;
  const total = given.total ?? queue + preprocess + inference;
  return {
    queue, preprocess, inference,
    rest: Math.max(0, total - queue - preprocess - inference),
    network: Math.max(0, tookMs - total),
  };
}

function timeline(times) {
  const shown = PARTS.map(([part, text]) => ({ part, text, ms: times[part] }));
  const bar = h("div", { class: "times", "aria-hidden": "true" }, shown.map(({ part, ms }) => {
    const piece = h("span", { "data-part": part });
    piece.style.setProperty("--share", ms);
    return piece;
  }));
  const list = h("ul", { class: "time-list" }, shown.map(({ part, text, ms }) =>
    h("li", { "data-part": part }, text, h("b", {}, durationText(ms)))));
  return [bar, list];
}
