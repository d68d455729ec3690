// Numbers as people read them.

const UNITS = ["bytes", "KiB", "MiB", "GiB", "TiB"];

/** Bytes in binary units with about three digits: "438 KiB", "12.4 MiB". */
export function formatBytes(bytes) {
  let unit = 0;
  let value = bytes;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  const digits = unit === 0 || value >= 100 || Number.isInteger(value) ? 0 : value >= 10 ? 1 : 2;
  return `${value.toFixed(digits)}\u00a0${UNITS[unit]}`;
}

/** The unit of bytes for an axis up to `limit`: its size, and a formatter of values in it. */
export function byteUnit(limit) {
  const unit = Math.min(UNITS.length - 1, Math.max(0, Math.floor(Math.log(limit / 2) / Math.log(1024))));
  const size = 1024 ** unit;
  return { size, format: (bytes) => `${formatCount(bytes / size)}\u00a0${UNITS[unit]}` };
}

/** A formatter of counts in the one unit that suits `limit`: "0.5 k", "1 k". */
export function countUpTo(limit) {
  const [divisor, suffix] = limit < 2e3 ? [1, ""] : limit < 2e6 ? [1e3, "\u00a0k"] : limit < 2e9 ? [1e6, "\u00a0M"] : [1e9, "\u00a0G"];
  return (count) => `${(count / divisor).toLocaleString("en-US")}${suffix}`;
}

/** A count with separators: "12,345". */
export function formatCount(count) {
  return Math.round(count).toLocaleString("en-US");
}

/** A large count in short: "7.9 M". */
export function formatShort(count) {
  if (count < 1e3) return String(count);
  const [value, suffix] =
    count < 1e6 ? [count / 1e3, "k"] : count < 1e9 ? [count / 1e6, "M"] : [count / 1e9, "G"];
  return `${value < 10 ? value.toFixed(1).replace(/\.0$/, "") : Math.round(value)}\u00a0${suffix}`;
}

/** A short duration: "38 ms", "1.24 s". */
export function formatMillis(millis) {
  if (millis < 10) return `${millis.toFixed(1)}\u00a0ms`;
  if (millis < 1000) return `${Math.round(millis)}\u00a0ms`;
  return `${(millis / 1000).toFixed(2)}\u00a0s`;
}

/** A rate: two digits at least, no false precision. */
export function formatRate(perSecond) {
  return perSecond < 100 ? perSecond.toFixed(1) : formatCount(perSecond);
}
