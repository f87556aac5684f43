// Numbers, sizes, times and names as text.

import { ANALYSES } from "./analyses.js";

/** A number in the notation of the command line (`kronoscope/display/numbers.py`): 1,234, 0.01234, 1.23e-5. */
export function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  const shown = Number.isInteger(value) && size < 1e7 ? value : Number(value.toPrecision(digits));
  const beyond = Math.abs(shown) >= 1e7 || Math.abs(shown) < 1e-4 || (size >= 1e5 && value.toExponential().startsWith("1e"));
  if (shown !== 0 && beyond) return scientific(value);
  return String(shown).replace(/\B(?<!\.\d*)(?=(\d{3})+(?!\d))/g, ",");
}

function scientific(value) {
  const [mantissa, exponent] = value.toExponential(2).split("e");
  return `${Number(mantissa)}e${Number(exponent)}`;
}

/** A tick of a logarithmic axis: a power of ten beyond a thousand as such. */
export function decade(value) {
  const rest = Math.abs(Math.log10(value));
  return rest > 3.5 && Math.abs(rest - Math.round(rest)) < 1e-9 ? scientific(value) : number(value);
}

/** A share as the command line writes it (`format_share` of `kronoscope/display/numbers.py`): 56.6%. */
export function percent(share) {
  if (share === null || share === undefined) return "–";
  if (share > 0 && share < 0.0001) return "< 0.01%";
  if (share > 0.9995 && share < 1) return "99.9%";
  return `${(share * 100).toFixed(share !== 0 && Math.abs(share) < 0.001 ? 2 : 1)}%`;
}

/** A number of hundredths that the service has rounded, with its one decimal. */
export function hundredths(value) {
  return `${value.toFixed(1)}%`;
}

/** A share of a model, cut to one decimal: what is not whole never reads 100.0%. */
export function portion(share) {
  return hundredths(Math.floor(share * 1000 + 1e-9) / 10);
}

export function bytes(size) {
  if (size === null || size === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB"];
  let unit = 0;
  let left = size;
  while (left >= 1024 && unit < units.length - 1) {
    left /= 1024;
    unit += 1;
  }
  return `${Number(left.toPrecision(3))} ${units[unit]}`;
}

export function seconds(span) {
  if (span === null || span === undefined || Number.isNaN(span)) return "–";
  if (span < 0.001) return "< 1 ms";
  if (span < 1) return `${Math.round(span * 1000)} ms`;
  if (span < 59.5) return `${span < 9.95 ? span.toFixed(1) : Math.round(span)} s`;
  const whole = Math.round(span); // or the rest would round to 60
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  const minutes = Math.round(span / 60);
  if (minutes < 1440) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
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
  return span < 5 ? "just now" : `${span < 59.5 ? `${Math.round(span)} s` : seconds(span)} ago`.replace(/ min \d+ s/, " min");
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

/** The model of a job, or what stands for it; null of a job that takes none. */
export function modelName(job) {
  const { model, factors } = job.document ?? {};
  if (model) return sourceName(model);
  return factors ? "factors of an earlier job" : null;
}

/** The caller's own name of a job, or that of its model; of a job that takes none, that of its analyses. */
export function jobName(job) {
  return job.name ?? modelName(job) ?? job.kinds.map((kind) => ANALYSES[kind]?.title ?? kind).join(" + ");
}

/** A row of an analysis: a layer, or a component of a training. */
export function unitOf(kind, capital = false) {
  const unit = ANALYSES[kind]?.unit ?? "layer";
  return capital ? unit[0].toUpperCase() + unit.slice(1) : unit;
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

const FORMS = { bytes, portion, percent, part: percent, cosine: (value) => value.toFixed(3) };

/** A field of a text, in the form that follows its name; null where it is not known. */
function field(value, form = "") {
  const counted = Array.isArray(value) ? value.length : value;
  if (value === null || counted === 0 && (Array.isArray(value) || form === "part" || form.includes("|"))) return form === "-" ? "–" : null;
  if (form.startsWith("=")) return String(value) === form.slice(1) ? "" : null;
  if (form.includes("|")) return several(counted, ...form.split("|"));
  if (Array.isArray(value)) return value.join(", ");
  return FORMS[form] ? FORMS[form](value) : number(value, Number(form) || undefined);
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
