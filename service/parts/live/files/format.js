// Numbers for people: short, with their units, in as many digits as they deserve.

const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });

/** 0.42, 4.2, 42, 4,200, 42.0k */
export function number(value) {
  if (value >= 10_000) return `${(value / 1000).toFixed(value >= 100_000 ? 0 : 1)}k`;
  if (value >= 10 || Number.isInteger(value)) return plain.format(value);
  return value.toFixed(value >= 1 ? 1 : 2);
}

/** [value, unit] of milliseconds */
export function duration(ms) {
  if (ms >= 10_000) return [(ms / 1000).toFixed(1), "s"];
  if (ms >= 1000) return [(ms / 1000).toFixed(2), "s"];
  if (ms >= 100) return [ms.toFixed(0), "ms"];
  if (ms >= 1) return [ms.toFixed(1), "ms"];
  return [ms.toFixed(2), "ms"];
}

export const durationText = (ms) => duration(ms).join(" ");

/** 5 s, 4 min, 3 h 12 min, 2 d 3 h */
export function age(seconds) {
  if (seconds < 10) return `${Math.max(0, seconds).toFixed(seconds < 1 ? 1 : 0)} s`;
  if (seconds < 100) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** 512 B, 1.2 MiB, ... */
export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  while (count >= 1024 && place < units.length - 1) [count, place] = [count / 1024, place + 1];
  return `${count >= 100 || place === 0 ? count.toFixed(0) : count.toFixed(1)} ${units[place]}`;
}

export const timeOfDay = (seconds) => clock.format(new Date(seconds * 1000));

/** "1 worker", "2 workers" */
export const plural = (count, noun) => `${plain.format(count)} ${noun}${count === 1 ? "" : "s"}`;

/** JSON over several lines, but for lists of nothing but numbers, each on its own. */
export function json(value) {
  const text = JSON.stringify(value, null, 2);
  return text.replace(/\[(?:[\s\d.,eE+-]|true|false|null)*\]/g, (list) => list.replace(/\s+/g, " ").replace("[ ", "[").replace(" ]", "]"));
}

export const sum = (values) => values.reduce((total, value) => total + value, 0);
