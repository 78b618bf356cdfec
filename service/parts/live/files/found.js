// Draws what a model found over its picture: boxes, masks and keypoints, with their names and scores.

import { h } from "./dom.js";

const MAX_NAMED = 8; // in the list below the picture
const MASK_ALPHA = 128;
const LONGEST = 1.5; // height of a drawing by its width: what is higher is drawn narrower
const LEAST_WIDTH = 320;
// COCO's person: https://cocodataset.org/#keypoints-2020
const LIMBS = [
  ["left_ankle", "left_knee"], ["left_knee", "left_hip"], ["right_ankle", "right_knee"], ["right_knee", "right_hip"],
  ["left_hip", "right_hip"], ["left_shoulder", "left_hip"], ["right_shoulder", "right_hip"],
  ["left_shoulder", "right_shoulder"], ["left_shoulder", "left_elbow"], ["right_shoulder", "right_elbow"],
  ["left_elbow", "left_wrist"], ["right_elbow", "right_wrist"], ["left_eye", "right_eye"], ["nose", "left_eye"],
  ["nose", "right_eye"], ["left_eye", "left_ear"], ["right_eye", "right_ear"],
];

const isRuns = (value) => Array.isArray(value?.counts) && Array.isArray(value.size) && value.size.length === 2;
const isList = (value, length, isOne) => Array.isArray(value) && value.length === length && value.every(isOne);
const isBox = (value) => isList(value, 4, Number.isFinite);

/** Whether a prediction is what a detector found, or a mask for each class. */
export const isFound = (value) => isBoxes(value) || isMasks(value);

const isBoxes = (value) => Array.isArray(value?.boxes) && value.boxes.every(isBox)
  && isList(value.labels, value.boxes.length, (each) => typeof each === "string")
  && isList(value.scores, value.boxes.length, Number.isFinite);

const isMasks = (value) => typeof value === "object" && value !== null && !Array.isArray(value)
  && Object.keys(value).length > 0 && Object.values(value).every(isRuns);

/** Elements that show it: a drawing once the picture is decoded, and a list of the names. */
export function foundElements(value, picture, width) {
  const things = isBoxes(value) ? thingsOf(value) : regionsOf(value);
  if (!things.length) return [h("p", { class: "quiet" }, "Nothing was found that is sure enough.")];
  const canvas = h("canvas", { class: "found", role: "img", hidden: "", "aria-label": spoken(things) });
  if (picture) draw(canvas, picture, things, Math.max(width, LEAST_WIDTH));
  const rest = things.length - MAX_NAMED;
  return [
    canvas,
    h("ol", { class: "labels" }, things.slice(0, MAX_NAMED).map(named)),
    ...(rest > 0 ? [h("p", { class: "quiet" }, `and ${rest.toLocaleString("en")} more`)] : []),
  ];
}

function thingsOf({ boxes, labels, scores, masks = [], keypoints = [] }) {
  const names = [...new Set(labels)];
  return boxes.map((box, place) => ({
    box, label: labels[place], share: scores[place], hue: hueOf(names.indexOf(labels[place])),
    mask: isRuns(masks[place]) ? masks[place] : null, keypoints: keypoints[place] ?? {},
  }));
}

function regionsOf(masks) {
  const regions = Object.entries(masks).map(([label, mask], place) => ({
    label, mask, hue: hueOf(place), share: areaOf(mask) / Math.max(1, mask.size[0] * mask.size[1]), keypoints: {},
  }));
  return regions.sort((one, other) => other.share - one.share);
}

const hueOf = (place) => (place * 137.5 + 215) % 360; // neighbours are far apart
const shade = (hue) => `hsl(${hue} 85% 40%)`;
const areaOf = ({ counts }) => counts.reduce((sum, count, place) => sum + (place % 2 ? count : 0), 0);
const percent = (share) => `${(share * 100).toFixed(1)} %`;
const spoken = (things) => `The picture with ${things.slice(0, MAX_NAMED).map(({ label, share }) => `${label} ${percent(share)}`).join(", ")}`;

function named({ label, share, hue }) {
  const fill = h("span", { class: "fill" });
  fill.style.setProperty("--share", `${Math.min(100, Math.max(0, share * 100))}%`);
  const swatch = h("span", { class: "swatch", "aria-hidden": "true" });
  swatch.style.setProperty("--hue", hue);
  return h("li", {}, h("span", {}, swatch, label), h("span", {}, percent(share)), h("div", { class: "track", "aria-hidden": "true" }, fill));
}

async function draw(canvas, picture, things, width) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(picture); // upright, as its EXIF orientation says
  } catch {
    return; // a format that the browser cannot draw: the names are shown all the same
  }
  const density = window.devicePixelRatio || 1;
  const scale = density * Math.min(width / bitmap.width, (LONGEST * width) / bitmap.height);
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  drawMasks(context, things.filter(({ mask }) => mask));
  const fromLast = [...things].reverse(); // the surest on top, and no line through a name
  for (const thing of fromLast) drawThing(context, thing, scale, density);
  for (const thing of fromLast) drawName(context, thing, scale, density);
  canvas.hidden = false;
}

function drawMasks(context, things) {
  if (!things.length) return;
  const { width, height } = context.canvas;
  const pixels = new ImageData(width, height);
  for (const { mask, hue } of things) paint(new Uint32Array(pixels.data.buffer), width, height, mask, colorOf(hue));
  const layer = new OffscreenCanvas(width, height);
  layer.getContext("2d").putImageData(pixels, 0, 0);
  context.drawImage(layer, 0, 0);
}

/** Fills the pixels of runs, which go down the columns and begin outside, in the size of the drawing. */
function paint(pixels, width, height, { size: [rows, columns], counts }, color) {
  let position = 0;
  counts.forEach((count, place) => {
    let begin = position;
    position += count;
    while (place % 2 && begin < position) {
      const column = Math.floor(begin / rows);
      const end = Math.min(position, (column + 1) * rows);
      const bottom = Math.round(((end - column * rows) / rows) * height);
      for (let x = Math.round((column / columns) * width); x < Math.round(((column + 1) / columns) * width); x++) {
        for (let y = Math.round(((begin - column * rows) / rows) * height); y < bottom; y++) pixels[y * width + x] = color;
      }
      begin = end;
    }
  });
}

/** A colour as ImageData has it in four bytes. */
function colorOf(hue) {
  const one = new OffscreenCanvas(1, 1).getContext("2d");
  one.fillStyle = `hsl(${hue} 90% 50%)`;
  one.fillRect(0, 0, 1, 1);
  const { data } = one.getImageData(0, 0, 1, 1);
  data[3] = MASK_ALPHA;
  return new Uint32Array(data.buffer)[0];
}

function drawThing(context, { box, hue, keypoints }, scale, density) {
  context.strokeStyle = context.fillStyle = shade(hue);
  context.lineWidth = 2 * density;
  const at = (name) => (keypoints[name] ?? []).slice(0, 2).map((place) => place * scale);
  for (const [from, to] of LIMBS) {
    if (!keypoints[from] || !keypoints[to]) continue;
    context.beginPath();
    context.moveTo(...at(from));
    context.lineTo(...at(to));
    context.stroke();
  }
  for (const name of Object.keys(keypoints)) {
    context.beginPath();
    context.arc(...at(name), 3 * density, 0, 2 * Math.PI);
    context.fill();
  }
  if (!box) return;
  const [left, top, right, bottom] = box.map((edge) => edge * scale);
  context.strokeRect(left, top, right - left, bottom - top);
}

function drawName(context, { box, label, share, hue }, scale, density) {
  if (!box) return;
  const [left, top] = box.map((edge) => edge * scale);
  const text = `${label} ${percent(share)}`;
  context.font = `600 ${12 * density}px system-ui, sans-serif`;
  const [width, height] = [context.measureText(text).width + 8 * density, 17 * density];
  const x = Math.max(0, Math.min(left, context.canvas.width - width));
  const y = top >= height ? top - height : Math.max(0, top);
  context.fillStyle = shade(hue);
  context.fillRect(x, y, width, height);
  context.fillStyle = "#fff";
  context.textBaseline = "middle";
  context.fillText(text, x + 4 * density, y + height / 2);
}
