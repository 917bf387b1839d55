// Numbers, sizes and times as people read them.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(count) {
  let value = count;
  let unit = 0;
  while (Math.abs(value) >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value.toFixed(unit === 0 || value >= 100 ? 0 : value >= 10 ? 1 : 2)} ${UNITS[unit]}`;
}

/** A number with as many digits as matter: 12,345 · 12.3 · 0.0123 · 1.2e-5. */
export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size !== 0 && size < 0.001) return value.toExponential(1);
  return String(Number(value.toPrecision(digits)));
}

export const percent = (share, digits = 0) =>
  share === null || share === undefined || Number.isNaN(share) ? "–" : `${(share * 100).toFixed(digits)} %`;

export function duration(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  if (seconds === 0) return "0 s";
  if (seconds < 0.001) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${Number((seconds * 1000).toPrecision(3))} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} days`;
}

export function moment(seconds) {
  if (!seconds) return "–";
  const then = new Date(seconds * 1000);
  const today = then.toDateString() === new Date().toDateString();
  const time = then.toLocaleTimeString("en-GB");
  return today ? time : `${then.toLocaleDateString("en-CA")} ${time}`;
}

/** A time since then, in its largest unit: it is read among others, and counts on. */
export function ago(seconds) {
  if (!seconds) return "–";
  const past = Math.max(0, Date.now() / 1000 - seconds);
  const [size, unit] = [[86400, "d"], [3600, "h"], [60, "min"]].find(([least]) => past >= least) ?? [1, "s"];
  return `${Math.floor(past / size)} ${unit} ago`;
}
export const plural = (count, one, many = `${one}s`) => `${number(count)} ${count === 1 ? one : many}`;
export const shortId = (id) => (id.length > 18 ? `${id.slice(0, 8)}…${id.slice(-6)}` : id);
/** A metric's name for people: grad_norm → grad norm. */
export const spoken = (name) => name.replaceAll("_", " ");
