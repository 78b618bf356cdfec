// "Try it": sends a picture, a file or JSON to the chosen model, and shows what comes back.

import { $, h, setText } from "./dom.js";
import { bytes, json } from "./format.js";
import { keyHeaders, setKey } from "./keys.js";
import { problemOf, showAnswer, showProblem } from "./result.js";
import { LINES_TYPE, showParts } from "./stream.js";

const MAX_ZEROS = 20_000; // numbers: more are no use to anyone in an editor
const DEFAULT_FILE_TYPE = "application/octet-stream";

const UNKNOWN_FORM =
  "This model reads its instances in a form of its own, and shows no example. What you send goes to its preprocess. " +
  "Give its class an `example` to see one here.";

let model = null; // {name, inputs, example, readsOwnForm, envelope, form, accepts, streams} of the one that is chosen
let file = null;
let isBusy = false;

export function startTryIt() {
  $("file").addEventListener("change", () => {
    take($("file").files[0]);
    $("file").value = ""; // so that the same one can be chosen again
  });
  $("send").addEventListener("click", send);
  $("sample").addEventListener("click", takeSample);
  for (const choice of document.querySelectorAll("input[name=kind]")) {
    choice.addEventListener("change", () => showKind(choice.value));
  }
  const drop = $("drop");
  for (const type of ["dragenter", "dragover"]) {
    drop.addEventListener(type, (event) => { event.preventDefault(); drop.classList.add("over"); });
  }
  for (const type of ["dragleave", "drop"]) {
    drop.addEventListener(type, (event) => { event.preventDefault(); drop.classList.remove("over"); });
  }
  drop.addEventListener("drop", (event) => take(event.dataTransfer.files[0]));
  document.addEventListener("paste", (event) => {
    const pasted = [...event.clipboardData.files][0];
    if (pasted && model && kindsOf(model).includes("file")) take(pasted);
  });
  $("json").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send();
  });
  showFile();
}

/** Tries this model from now on; `health` is its part of what /health says. */
export function chooseModel(health) {
  const { name, inputs, example, reads_own_form: readsOwnForm } = health;
  const { envelope = true, form, accepts, streams = false } = health.interface ?? {};
  const shape = JSON.stringify([name, inputs, example, readsOwnForm, envelope, form, accepts, streams]);
  if (model?.shape === shape) return;
  const isOther = model?.name !== name;
  model = { name, inputs, example, readsOwnForm, envelope, form, accepts, streams, shape };
  const kinds = kindsOf(model);
  $("try-kind").hidden = kinds.length < 2;
  $("json").value = json(bodyFor(model));
  setText($("try-hint"), isKnown(model) ? "" : UNKNOWN_FORM);
  $("try-hint").hidden = isKnown(model);
  $("file").accept = takesImages(model) ? "image/*" : "";
  $("sample").hidden = !takesImages(model);
  if (isOther) {
    $("answer").replaceChildren();
    setText($("try-status"), "");
  }
  showKind(kinds[0]);
  showFile();
}

const takesImages = ({ inputs }) => inputs.length === 1 && inputs[0].name === "image" && inputs[0].dtype === "uint8";

/** Whether an instance is known that it takes; nothing is invented for the others. */
const isKnown = ({ inputs, example, readsOwnForm }) => example !== null || (inputs.length > 0 && !readsOwnForm);

/** How an instance can be given: the likelier way first. */
function kindsOf(chosen) {
  if (chosen.form === "instance") return ["json"];
  if (takesImages(chosen)) return chosen.readsOwnForm ? ["file", "json"] : ["file"];
  if (chosen.example?.b64 !== undefined) return ["json", "file"];
  return isKnown(chosen) ? ["json"] : ["file", "json"];
}

/** A whole body of JSON: some models say that one instance is all of it. */
function bodyFor(chosen) {
  if (chosen.envelope) return { instances: isKnown(chosen) ? [instanceFor(chosen)] : [] };
  const instance = isKnown(chosen) ? instanceFor(chosen) : {};
  return chosen.accepts && instance?.b64 !== undefined ? instance.b64 : instance;
}

function instanceFor({ inputs, example }) {
  if (example !== null) return example;
  const values = inputs.map((input) => [input.name, zeros(input)]);
  return values.length === 1 ? values[0][1] : Object.fromEntries(values);
}

/** Zeros in the shape of one instance, any length being 1; none where they would be too many. */
function zeros({ dtype, shape }) {
  const sizes = shape.slice(1).map((size) => Math.max(size, 1));
  if (sizes.reduce((product, size) => product * size, 1) > MAX_ZEROS) return [];
  const zero = dtype === "bool" ? false : dtype === "string" ? "" : 0;
  return sizes.reduceRight((inner, size) => Array.from({ length: size }, () => inner), zero);
}

function showKind(kind) {
  for (const choice of document.querySelectorAll("input[name=kind]")) choice.checked = choice.value === kind;
  $("try-file").hidden = kind !== "file";
  $("try-json").hidden = kind !== "json";
  updateButton();
}

const kind = () => ($("try-json").hidden ? "file" : "json");

function updateButton() {
  $("send").disabled = isBusy || model === null || (kind() === "file" && file === null);
}

function take(chosen) {
  if (!chosen) return;
  file = chosen;
  showFile();
  send();
}

async function takeSample() {
  try {
    const response = await fetch("page/sample.jpg");
    if (!response.ok) throw new Error(`it answered ${response.status}`);
    take(new File([await response.blob()], "sample.jpg", { type: "image/jpeg" }));
  } catch (error) {
    showProblem($("answer"), { title: "No sample", detail: `The service did not send one: ${error.message}.` });
  }
}

async function showFile() {
  const canvas = $("preview");
  const text = $("drop-text");
  canvas.hidden = true;
  updateButton();
  if (file === null) {
    const what = model && takesImages(model) ? "a picture" : "a file";
    text.replaceChildren(h("b", {}, `Choose ${what}`), ", drop or paste one here");
    return;
  }
  setText(text, `${file.name} · ${bytes(file.size)}`);
  const shown = file;
  try {
    const picture = await createImageBitmap(shown);
    if (file !== shown) return;
    const scale = Math.min(1, 640 / Math.max(picture.width, picture.height));
    canvas.width = Math.max(1, picture.width * scale);
    canvas.height = Math.max(1, picture.height * scale);
    canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
    canvas.setAttribute("aria-label", `Preview of ${file.name}`);
    canvas.hidden = false;
  } catch {
    // It is no picture that a browser can draw; the service may read it all the same.
  }
}

async function send() {
  if (isBusy || model === null || (kind() === "file" && file === null)) return;
  const [body, type] = kind() === "file"
    ? [file, file.type || DEFAULT_FILE_TYPE]
    : [$("json").value, "application/json"];
  const picture = kind() === "file" ? file : null;
  const { envelope } = model;
  isBusy = true;
  updateButton();
  setText($("try-status"), "Predicting…");
  $("answer").setAttribute("aria-busy", "true");
  const began = performance.now();
  try {
    const response = await fetch(`predict/${encodeURIComponent(model.name)}`, {
      method: "POST",
      headers: { "Content-Type": type, Accept: model.streams ? LINES_TYPE : "application/json", ...keyHeaders("predict") },
      body,
    });
    if (response.ok && response.headers.get("content-type") === LINES_TYPE) {
      setText($("try-status"), "Parts come…");
      const num = await showParts($("answer"), response);
      setText($("try-status"), `${num} parts in ${(performance.now() - began).toFixed(0)} ms`);
      return;
    }
    const text = await response.text();
    const tookMs = performance.now() - began;
    if (response.ok) {
      const answer = JSON.parse(text);
      showAnswer($("answer"), envelope ? answer : { predictions: [answer] }, response.headers, tookMs, picture);
      setText($("try-status"), `Answered in ${tookMs.toFixed(0)} ms`);
    } else {
      setText($("try-status"), `Failed with ${response.status}`);
      showProblem($("answer"), problemOf(text, response), response.status === 401 || response.status === 403 ? askForKey : null);
    }
  } catch (error) {
    setText($("try-status"), "Failed");
    showProblem($("answer"), { title: "No answer", detail: `The service did not answer: ${error.message}.` });
  } finally {
    isBusy = false;
    $("answer").removeAttribute("aria-busy");
    updateButton();
  }
}

function askForKey(key) {
  setKey("predict", key);
  send();
}
