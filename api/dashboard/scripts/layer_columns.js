// The columns of the layer table, as the catalog states them for an analysis.

import { ANALYSES } from "./analyses.js";
import { at, bytes, condition, fill, number, percent, seconds, unitOf, words } from "./format.js";

const shape = (row) => (row.record?.in_dim && row.record?.out_dim ? row.record.in_dim * row.record.out_dim : null);

const LAYER = { name: "Layer", value: (row) => row.ordinal, show: (row) => nameOf(row), text: true };
const TYPE = { name: "Type", title: "Class of the module", value: (row) => row.module ?? null, text: true, fixed: true };
const SIZE = {
  name: "A × G",
  title: "Rows of A and rows of G",
  value: shape,
  fixed: true,
  show: (row) => (row.record?.in_dim && row.record?.out_dim ? `${number(row.record.in_dim)} × ${number(row.record.out_dim)}` : "–"),
};
const PARAMETERS = { name: "Parameters", value: (row) => row.parameter_count ?? null, fixed: true };
const SECONDS = { name: "Time", title: "Seconds of the measurement of this layer", value: (row) => row.observed?.seconds ?? null, show: (row) => seconds(row.observed?.seconds) };

const SHOW = {
  percent,
  bytes,
  cosine: (value) => value.toFixed(3),
};

/** One of the catalog's columns, of a list's element with a key in the list `keys`. */
function column(told, key, keys = []) {
  const heading = Array.isArray(told.heading) ? told.heading[Number(keys.length > 1)] : told.heading;
  if (!heading) return null;
  const named = (text) => text.replace("{}", Number.isInteger(key) ? String(key) : number(key));
  const [path, name] = pathAndKey(told.each);
  const source = (row) => (path ? (at(row, path)?.find((each) => each[name] === key) ?? null) : row);
  const value = (row) => at(source(row), told.value);
  const show = SHOW[told.form] ?? number;
  const late = (row) => row.metrics?.convergence?.find((each) => told.value.endsWith(`.${each.metric}`) && each.not_converged);
  const whole = (row) => (typeof told.whole === "number" ? told.whole : at(row, told.whole) || 1);
  return {
    name: named(heading),
    title: named(told.title ?? ""),
    text: told.form === "text",
    relative: told.relative,
    infinite: Boolean(told.counted),
    optional: told.optional,
    value,
    show: (row) => {
      if (told.counted) return condition(value(row), at(row, told.counted));
      return value(row) === null ? "–" : show(value(row));
    },
    share: told.whole ? (row) => (value(row) === null ? null : value(row) / whole(row)) : null,
    note: (row) => {
      if (told.converging && late(row)) return `not converged: ${late(row).no_extrapolation ?? `extrapolates to ${number(late(row).extrapolation)}`}`;
      return told.note ? fill(told.note, source(row)) : null;
    },
  };
}

function pathAndKey(each) {
  const end = each?.lastIndexOf(".");
  return each ? [each.slice(0, end), each.slice(end + 1)] : [null, null];
}

/** The name of a row's layer, whole. */
export function nameOf(row) {
  return row.layer || "(model)";
}

/** The columns of an analysis's table, the layer's name first. */
export function columnsOf(kind, rows) {
  const told = ANALYSES[kind]?.columns ?? [];
  const sample = rows.find((row) => row.metrics)?.metrics ?? {};
  const generic = Object.keys(sample).filter((key) => typeof sample[key] === "number").slice(0, 6);
  const stated = told.length ? told : generic.map((key) => ({ value: `metrics.${key}`, heading: words(key), title: key }));
  const columns = [...Map.groupBy(stated, (each) => each.each ?? each)].flatMap(([each, group]) => {
    const [path, name] = pathAndKey(group[0].each);
    if (!path) return [column(each)];
    const keys = [...new Set(rows.flatMap((row) => (at(row, path) ?? []).map((element) => element[name])))];
    return keys.flatMap((key) => group.map((one) => column(one, key, keys)));
  });
  const shown = columns.filter((each) => each && !(each.optional && rows.every((row) => each.value(row) === null)));
  const name = { ...LAYER, name: unitOf(kind, true) };
  if (ANALYSES[kind]?.collects === false) return [name, PARAMETERS, ...shown];
  // where a column is left out for want of room, so is the time
  return [name, TYPE, SIZE, PARAMETERS, ...shown, ...(columns.includes(null) ? [] : [SECONDS])];
}
