// Logarithmic axes: positions, ticks at powers of ten, fewer of them where there is no room.

export function logScale(low, high, from, to) {
  const a = Math.log10(low);
  const b = Math.log10(high);
  const span = b - a || 1;
  return (value) => from + ((Math.log10(value) - a) / span) * (to - from);
}

/** Powers of ten inside [low, high], at most `most` of them, evenly stepped. */
export function decades(low, high, most) {
  const first = Math.ceil(Math.log10(low) - 1e-9);
  const last = Math.floor(Math.log10(high) + 1e-9);
  const step = Math.max(1, Math.ceil((last - first + 1) / most));
  const ticks = [];
  for (let exponent = last; exponent >= first; exponent -= step) ticks.unshift(exponent);
  return ticks;
}

/** Twice and five times each power of ten inside [low, high]: lines for the eye, without a number. */
export function between(low, high) {
  const values = [];
  for (let exponent = Math.floor(Math.log10(low)); exponent <= Math.log10(high); exponent += 1) {
    for (const factor of [2, 5]) values.push(factor * 10 ** exponent);
  }
  return values.filter((value) => value >= low && value <= high);
}

/** Ticks of a short axis of counts: 1, 2, 5, 10, 20 … */
export function counts(high, width) {
  const ticks = [];
  for (let decade = 1; decade <= high; decade *= 10) {
    for (const factor of [1, 2, 5]) if (decade * factor <= high) ticks.push(decade * factor);
  }
  const room = width / 48;
  return ticks.length > room ? ticks.filter((tick) => /^10*$/.test(String(tick))) : ticks;
}

/** Indices 0 … n−1, thinned so that a logarithmic axis loses nothing that could be seen. */
export function thinned(n, most = 700) {
  if (n <= most) return Array.from({ length: n }, (_, index) => index);
  const kept = new Set();
  for (let step = 0; step < most; step += 1) kept.add(Math.round(n ** (step / (most - 1))) - 1);
  return [...kept].sort((a, b) => a - b);
}
