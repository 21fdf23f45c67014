// Numbers as people read them.

export function duration(us) {
  if (us === null || us === undefined || Number.isNaN(us)) return "–";
  if (us < 1000) return `${trim(us)} µs`;
  if (us < 1e6) return `${trim(us / 1e3)} ms`;
  return `${trim(us / 1e6)} s`;
}

export function milliseconds(ms) {
  return ms === null || ms === undefined ? "–" : duration(ms * 1e3);
}

export function seconds(value) {
  if (value < 90) return `${Math.round(value)} s`;
  if (value < 5400) return `${Math.round(value / 60)} min`;
  return `${trim(value / 3600)} h`;
}

export function bytes(size) {
  let value = size;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 1024) return `${unit === "B" ? value : trim(value)} ${unit}`;
    value /= 1024;
  }
  return `${trim(value)} TiB`;
}

export function times(value) {
  return value === null || value === undefined ? "–" : `${value.toFixed(2)}×`;
}

export function count(value) {
  return Math.round(value).toLocaleString("en");
}

export function rate(value) {
  return value >= 100 ? count(value) : trim(value);
}

export function percent(share) {
  return `${(share * 100).toFixed(share < 0.0995 ? 1 : 0)} %`;
}

export function small(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  return Math.abs(value) >= 0.01 && Math.abs(value) < 1e4 ? trim(value) : value.toExponential(1);
}

/** Three figures at most, no idle zeros. */
export function trim(value) {
  return String(Number(Number(value).toPrecision(3)));
}

export function clock(epochSeconds) {
  return new Date(epochSeconds * 1e3).toLocaleTimeString("en-GB");
}

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}
