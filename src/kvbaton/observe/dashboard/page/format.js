// Numbers for people: three figures, the unit that fits, a dash for what is not known.

const NONE = "–";

const known = (value) => typeof value === "number" && Number.isFinite(value);

function figures(value) {
  if (value >= 100) return Math.round(value).toLocaleString("en-US");
  if (value >= 10) return value.toFixed(1).replace(/\.0$/, "");
  return value.toFixed(2).replace(/\.?0+$/, "");
}

export const count = (value) => (known(value) ? Math.round(value).toLocaleString("en-US") : NONE);

export const rate = (value) => (known(value) ? figures(value) : NONE);

const SIZES = ["B", "kB", "MB", "GB", "TB"];

export function bytes(value) {
  if (!known(value)) return NONE;
  let size = 0;
  while (value >= 1000 && size < SIZES.length - 1) {
    value /= 1000;
    size += 1;
  }
  return `${figures(value)} ${SIZES[size]}`;
}

export const bytesRate = (value) => (known(value) ? `${bytes(value)}/s` : NONE);

export function ms(value) {
  if (!known(value)) return NONE;
  if (value >= 1000) return `${figures(value / 1000)} s`;
  return value < 1 && value > 0 ? `${figures(value * 1000)} µs` : `${figures(value)} ms`;
}

export function seconds(value) {
  if (!known(value)) return NONE;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 60) return `${value < 10 ? figures(value) : Math.round(value)} s`;
  const rest = Math.floor(value % 60);
  if (value < 3600) return `${Math.floor(value / 60)} min${rest ? ` ${rest} s` : ""}`;
  return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
}

export function ago(value) {
  if (!known(value)) return NONE;
  if (value < 1) return "now";
  return value < 60 ? `${Math.round(value)} s ago` : value < 3600 ? `${Math.round(value / 60)} min ago` : `${Math.round(value / 3600)} h ago`;
}

export function percent(share) {
  if (!known(share)) return NONE;
  if (share === 1) return "100 %";
  const shown = Math.min(share * 100, 99.99); // nothing but all of them is 100 %
  return `${shown >= 99 ? shown.toFixed(2) : shown.toFixed(1)} %`;
}

export const clock = (unix) =>
  known(unix) && unix > 0 ? new Date(unix * 1000).toISOString().slice(11, 23) + " UTC" : NONE;

/** A long id with its middle left out. */
export const short = (id, most = 20) => (id.length <= most ? id : `${id.slice(0, most - 7)}…${id.slice(-6)}`);

export const words = (name) => String(name).replaceAll("_", " ");
