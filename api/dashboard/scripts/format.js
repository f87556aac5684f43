// Numbers, sizes, times and names as text.

const WHOLE = new Intl.NumberFormat("en");
const SUPERSCRIPT = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };

function power(exponent) {
  return "10" + String(exponent).replace(/./g, (sign) => SUPERSCRIPT[sign] ?? sign);
}

/** A power of ten as such, any other number as number() has it: for the ticks of a logarithmic axis. */
export function decade(value) {
  const [mantissa, exponent] = value.toExponential().split("e");
  return mantissa === "1" ? power(Number(exponent)) : number(value);
}

export function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  const [mantissa, exponent] = value.toExponential(Math.max(0, digits - 1)).split("e");
  if (value === 10 ** Number(exponent) && (size >= 1e5 || size < 1e-2)) return power(Number(exponent));
  if (Number.isInteger(value) && size < 1e7) return WHOLE.format(value).replace("-", "−");
  if (size >= 1e6 || size < 1e-3) return `${mantissa.replace("-", "−")}·${power(Number(exponent))}`;
  return new Intl.NumberFormat("en", { maximumSignificantDigits: digits }).format(value).replace("-", "−");
}

export function percent(share, digits = 1) {
  if (share === null || share === undefined) return "–";
  const value = share * 100;
  if (value > 0 && value < 0.01) return "< 0.01 %";
  if (value > 99.95 && value < 100) return "99.9 %";
  return `${Number.isInteger(value) ? value : value.toFixed(value < 0.1 && value > 0 ? 2 : digits)} %`;
}

/** A share of a model, cut to one decimal: what is not whole never reads 100 %. */
export function portion(share) {
  return `${Math.floor(share * 1000 + 1e-9) / 10} %`;
}

export function bytes(size) {
  if (size === null || size === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  let left = size;
  while (left >= 1024 && unit < units.length - 1) {
    left /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? left : left.toFixed(left < 10 ? 1 : 0)} ${units[unit]}`;
}

export function seconds(span) {
  if (span === null || span === undefined || Number.isNaN(span)) return "–";
  if (span < 0.001) return "< 1 ms";
  if (span < 1) return `${Math.round(span * 1000)} ms`;
  if (span < 60) return `${span < 10 ? span.toFixed(1) : Math.round(span)} s`;
  if (span < 3600) return `${Math.floor(span / 60)} min ${Math.round(span % 60)} s`;
  if (span < 86400) return `${Math.floor(span / 3600)} h ${Math.round((span % 3600) / 60)} min`;
  return `${Math.floor(span / 86400)} d`;
}

/** Remaining time in the words of the command line: `12 s`, `4 min`, `2 h 10 min`. */
export function remaining(span) {
  if (span < 60) return `${Math.max(1, Math.round(span))} s`;
  const minutes = Math.round(span / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
  return hours % 24 ? `${Math.floor(hours / 24)} d ${hours % 24} h` : `${Math.floor(hours / 24)} d`;
}

export function age(stamp, now = Date.now()) {
  const span = Math.max(0, (now - Date.parse(stamp)) / 1000);
  return span < 5 ? "just now" : `${seconds(span < 60 ? Math.round(span) : span)} ago`.replace(/ min \d+ s/, " min");
}

export function between(from, to) {
  return from && to ? seconds((Date.parse(to) - Date.parse(from)) / 1000) : "–";
}

export function clock(stamp) {
  return stamp ? new Date(stamp).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" }) : "–";
}

export function sourceName(source) {
  if (!source) return "–";
  return source.name ?? source.id ?? source.factory ?? source.path ?? source.source;
}

export function modelName(job) {
  const document = job.document ?? {};
  if (document.model) return sourceName(document.model);
  return document.factors ? "factors of an earlier job" : "–";
}

/** The caller's own name of a job, or that of its model. */
export function jobName(job) {
  return job.name ?? modelName(job);
}

export function several(count, one, many = `${one}s`) {
  return `${number(count)} ${count === 1 ? one : many}`;
}

export function words(name) {
  return String(name).replaceAll("_", " ");
}

const CURVATURES = { kfac: "K-FAC", ekfac: "EK-FAC", ggn: "GGN", fisher: "Fisher", empirical: "Empirical Fisher", hessian: "Hessian" };

/** The name of a curvature, as people write it. */
export function curvatureName(of) {
  return CURVATURES[of] ?? String(of);
}

/** The value at a path, such as `metrics.trace`; of several, parted by `|`, the first that is there. */
export function at(source, path) {
  const values = path.split("|").map((way) => way.split(".").reduce((value, step) => value?.[step], source));
  return values.find((value) => value !== null && value !== undefined) ?? null;
}

const FORMS = { bytes, portion, percent: (share) => percent(share, 2), part: (share) => percent(share, 2), cosine: (value) => value.toFixed(3) };

/** A field of a text, in the form that follows its name; null where it is not known. */
function field(value, form = "") {
  const counted = Array.isArray(value) ? value.length : value;
  if (value === null || counted === 0 && (Array.isArray(value) || form === "part" || form.includes("|"))) return form === "-" ? "–" : null;
  if (form.startsWith("=")) return String(value) === form.slice(1) ? "" : null;
  if (form.includes("|")) return several(counted, ...form.split("|"));
  if (Array.isArray(value)) return value.join(", ");
  return FORMS[form] ? FORMS[form](value) : number(value, Number(form) || 3);
}

/** The first text whose fields are all known, with those of `source` in it; else null, or the `last` with dashes. */
export function fill(texts, source, last = false) {
  const choices = [texts].flat();
  for (const text of choices) {
    let known = true;
    const filled = text.replace(/\{([\w.|]+)(?::([^}]*))?\}/g, (_, path, form) => {
      const shown = field(at(source, path), form);
      known &&= shown !== null;
      return shown ?? "–";
    });
    if (known || (last && text === choices.at(-1))) return filled;
  }
  return null;
}

/** A condition number: ∞ where the matrix is singular, a dash where its eigenvalues were not `counted`. */
export function condition(kappa, counted) {
  if (kappa !== null && kappa !== undefined) return number(kappa);
  return counted === null || counted === undefined ? "–" : "∞";
}

function elided(name, width) {
  const start = Math.floor(width / 4);
  return name.length <= width ? name : `${name.slice(0, start)}…${name.slice(start + 1 - width)}`;
}

/** Names cut to `width` in the middle; where two would come out equal, around the part in which they differ, or numbered. */
export function distinctNames(names, width) {
  const groups = Map.groupBy(names, (name) => elided(name, width));
  const taken = new Set();
  const shown = new Map();
  for (const [text, group] of groups) {
    const alike = [...new Set(group)];
    const [first, last] = [alike.reduce((a, b) => (a < b ? a : b)), alike.reduce((a, b) => (a > b ? a : b))];
    let common = 0;
    while (common < first.length && first[common] === last[common]) common += 1;
    for (const name of alike) {
      const begin = Math.max(0, Math.min(common - Math.floor(width / 2), name.length - width + 1));
      const end = begin + width - 2;
      const around = `${begin ? "…" : ""}${name.slice(begin, end)}${end < name.length ? "…" : ""}`;
      const plain = alike.length === 1 ? text : around;
      let unique = plain;
      for (let number = 2; taken.has(unique); number += 1) unique = `${plain.slice(0, width - 4)}~${number}`;
      taken.add(unique);
      shown.set(name, unique);
    }
  }
  return names.map((name) => shown.get(name));
}
