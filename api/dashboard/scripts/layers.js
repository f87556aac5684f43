// The layer table: one analysis at a time, sortable by every column, with small bars.

import { ANALYSES } from "./analyses.js";
import { h, replace } from "./dom.js";
import { at, bytes, condition, fill, number, percent, seconds, words } from "./format.js";

const shape = (row) => (row.record?.in_dim && row.record?.out_dim ? row.record.in_dim * row.record.out_dim : null);

const LAYER = { name: "Layer", value: (row) => row.ordinal, text: true };
const SIZE = {
  name: "A × G",
  title: "Rows of A and rows of G",
  value: shape,
  show: (row) => (row.record?.in_dim && row.record?.out_dim ? `${number(row.record.in_dim)} × ${number(row.record.out_dim)}` : "–"),
};
const PARAMETERS = { name: "Parameters", value: (row) => row.parameter_count };
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
    optional: told.optional,
    value,
    show: (row) => {
      if (told.counted) return condition(value(row), at(row, told.counted));
      return value(row) === null ? "–" : show(value(row));
    },
    share: told.whole ? (row) => (value(row) === null ? null : value(row) / whole(row)) : null,
    note: (row) => {
      if (told.converging && late(row)) return `not converged: extrapolates to ${number(late(row).extrapolation)}`;
      return told.note ? fill(told.note, source(row)) : null;
    },
  };
}

function pathAndKey(each) {
  const end = each?.lastIndexOf(".");
  return each ? [each.slice(0, end), each.slice(end + 1)] : [null, null];
}

function columnsOf(kind, rows) {
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
  // where a column is left out for want of room, so is the time
  return [LAYER, SIZE, PARAMETERS, ...shown, ...(columns.includes(null) ? [] : [SECONDS])];
}

function compare(column, descending) {
  return (a, b) => {
    const left = column.value(a);
    const right = column.value(b);
    if (left === null || right === null) return (left === null) - (right === null);
    const order = typeof left === "string" ? left.localeCompare(right) : left - right;
    return descending ? -order : order;
  };
}

/** A table of rows in `place`; `select(row)` is called when a layer is chosen. */
export class LayerTable {
  constructor(place, select) {
    this.place = place;
    this.select = select;
    this.kind = null;
    this.picked = false;
    this.rows = [];
    this.part = null;
    this.column = LAYER;
    this.descending = false;
    this.filter = "";
    this.chosen = null;
    this.tabs = h("div", { class: "segments", role: "group", "aria-label": "Analysis" });
    this.search = h("input", {
      type: "search",
      class: "search",
      placeholder: "Filter layers",
      "aria-label": "Filter layers by name",
      oninput: (event) => {
        this.filter = event.target.value.toLowerCase();
        this.draw();
      },
    });
    this.count = h("span", { class: "muted small", role: "status" });
    this.body = h("div", { class: "scroll", role: "region", "aria-label": "Layer table", tabindex: 0 });
    this.shown = false;
  }

  /** `part` says of which part of the model the rows are, where one is missing. */
  show(rows, kinds, part = this.part) {
    this.rows = rows;
    this.part = part;
    // the analyses of a running job arrive one by one: the table switches to the usual one, unless another was picked
    const usual = kinds.find((kind) => ANALYSES[kind]?.opens) ?? kinds[0];
    if (this.kind !== usual && !(this.picked && kinds.includes(this.kind))) {
      this.kind = usual;
      this.column = LAYER;
      this.descending = false;
    }
    replace(
      this.tabs,
      kinds.length > 1
        ? kinds.map((kind) => h("button", { type: "button", "aria-pressed": String(kind === this.kind), onclick: () => this.choose(kind, kinds) }, kind))
        : [],
    );
    if (!this.shown) {
      replace(
        this.place,
        h("div", { class: "row apart" }, h("div", { class: "row" }, h("h2", {}, "Layers"), this.count), h("div", { class: "row" }, this.tabs, this.search)),
        h("div", { class: "card flush" }, this.body),
      );
      this.shown = true;
    }
    this.draw();
  }

  choose(kind, kinds) {
    this.kind = kind;
    this.picked = true;
    this.column = LAYER;
    this.descending = false;
    this.show(this.rows, kinds);
    this.tabs.querySelector('[aria-pressed="true"]')?.focus();
  }

  sort(column) {
    this.descending = this.column.name === column.name ? !this.descending : !column.text;
    this.column = column;
    this.draw();
    this.body.querySelector('th[aria-sort="ascending"] button, th[aria-sort="descending"] button')?.focus();
  }

  mark(ordinal) {
    this.chosen = ordinal;
    for (const row of this.body.querySelectorAll("tbody tr")) row.toggleAttribute("data-chosen", row.dataset.ordinal === String(ordinal));
  }

  draw() {
    const rows = this.rows.filter((row) => row.kind === this.kind);
    const columns = columnsOf(this.kind, rows);
    const kept = rows.filter((row) => !this.filter || row.layer.toLowerCase().includes(this.filter));
    kept.sort(compare(this.column, this.descending));
    const shown = kept.length === rows.length ? `${number(rows.length)}` : `${number(kept.length)} of ${number(rows.length)}`;
    this.count.textContent = this.part ? `${shown}, figures ${this.part}` : shown;
    const largest = new Map(columns.filter((column) => column.relative).map((column) => [column, Math.max(...rows.map((row) => column.value(row) ?? 0))]));
    const head = columns.map((column) => {
      const sort = this.column.name === column.name ? (this.descending ? "descending" : "ascending") : "none";
      return h(
        "th",
        { scope: "col", class: column.text ? "" : "numeric", "aria-sort": sort },
        h("button", { type: "button", class: "sort", title: column.title, onclick: () => this.sort(column) }, column.name),
      );
    });
    replace(
      this.body,
      h(
        "table",
        { class: "layers" },
        h("caption", { class: "hidden-label" }, `Layers, analysis ${this.kind}`),
        h("thead", {}, h("tr", {}, head)),
        h("tbody", {}, kept.map((row) => this.line(row, columns, largest))),
      ),
      kept.length ? null : h("p", { class: "muted pad" }, rows.length ? "No layer has this name." : "No layer has been measured yet."),
    );
  }

  line(row, columns, largest) {
    const notCovered = row.status === "declared";
    const name = h(
      "td",
      { class: "cell-layer" },
      notCovered
        ? h("span", { class: "mono strong" }, row.layer || "(model)")
        : h("button", { type: "button", class: "layer-name mono", onclick: () => this.select(row) }, row.layer || "(model)"),
      h("span", { class: "under" }, row.module, row.status === "zero_curvature" ? h("span", { class: "tag" }, "zero curvature") : null),
    );
    const attributes = { "data-ordinal": row.ordinal, "data-status": row.status, "data-chosen": this.chosen === row.ordinal };
    if (notCovered) {
      const parameters = h("td", { class: "numeric" }, number(row.parameter_count));
      const why = h("td", { colspan: columns.length - 3, class: "cell-why" }, h("span", { class: "tag" }, "not covered"), ` ${words(row.reason ?? "")}`);
      return h("tr", attributes, name, h("td", { class: "numeric muted" }, "–"), parameters, why);
    }
    return h("tr", attributes, name, columns.slice(1).map((column) => this.cell(row, column, largest)));
  }

  cell(row, column, largest) {
    const value = column.value(row);
    const text = column.show ? column.show(row) : number(value);
    if (column.text) return h("td", { class: "mono small" }, value ?? "–");
    let share = null;
    if (column.share) share = column.share(row);
    else if (column.relative && value !== null) share = value / (largest.get(column) || 1);
    const width = Math.min(1, Math.max(0, share));
    const bar = share === null ? null : h("span", { class: "small-bar", title: percent(width, 2) }, h("span", { share: width }));
    const note = column.note?.(row);
    return h("td", { class: "numeric" }, text, note ? h("span", { class: "star", title: note, role: "note", "aria-label": note }, "*") : null, bar);
  }
}
