// The layers of one analysis at a time: a picture over depth, a dense table of which only what is in sight is drawn, details.

import { ANALYSES } from "./analyses.js";
import { DepthPicture } from "../plots/depth.js";
import { showDetails } from "./details.js";
import { h, replace } from "./dom.js";
import { number, percent, unitOf, words } from "./format.js";
import { columnsOf, nameOf } from "./layer_columns.js";

// pixels; style sheets have the same line height, and a monospaced and a usual character of these widths
const LINE = 16;
const PADDING = 6;
const MONO = 7.3;
const SANS = 6.7;
const WIDEST_NAME = 62;
const WIDEST_NAME_NARROW = 21;
// rows drawn beyond each end of what is in sight; shorter tables are drawn whole
const BEYOND = 6;
const STRIDE = 4;
const BREAKS = /(?<=[._])/;
const WHOLE = 60;
const SHORT = 20;

function compare(column, descending) {
  return (a, b) => {
    const left = column.value(a);
    const right = column.value(b);
    if (left === null || right === null) return (left === null) - (right === null);
    const order = typeof left === "string" ? left.localeCompare(right) : left - right;
    return descending ? -order : order;
  };
}

/** The lines that a name takes where it is broken behind dots and underscores alone, or in parts that are too long. */
function linesOf(name, width) {
  let [lines, used] = [1, 0];
  for (const part of name.split(BREAKS)) {
    if (used && used + part.length > width) [lines, used] = [lines + 1, 0];
    lines += Math.floor(Math.max(0, part.length - 1) / width);
    used += part.length;
  }
  return lines;
}

/** A table of rows in `place`; `select(row)` is called when a layer is chosen. */
export class LayerTable {
  constructor(place, select, signal) {
    this.place = place;
    this.select = select;
    this.kind = null;
    this.picked = false;
    this.rows = [];
    this.part = null;
    this.sorted = { name: null, descending: false };
    this.filter = "";
    this.chosen = null;
    this.narrow = matchMedia("(max-width: 720px)");
    this.tabs = h("div", { class: "segments", role: "group", "aria-label": "Analysis" });
    this.search = h("input", {
      type: "search",
      class: "search",
      oninput: (event) => {
        this.filter = event.target.value.toLowerCase();
        this.body.scrollTop = 0;
        this.draw();
      },
    });
    this.count = h("span", { class: "muted small", role: "status" });
    this.body = h("div", { class: "scroll layer-rows", role: "region", tabindex: 0, onscroll: () => this.later(), onkeydown: (event) => this.type(event) });
    this.details = h("div", {});
    this.spectra = h("div", {});
    this.picture = h("div", {});
    this.left = h("div", { class: "stack tight" }, h("div", { class: "card flush" }, this.body));
    this.beside = h("aside", { class: "card beside", "aria-label": "Details", tabindex: 0 }, this.details);
    this.depth = new DepthPicture(this.picture, (row) => this.choose(row), () => this.narrow.matches && this.draw());
    this.shown = false;
    this.watcher = new ResizeObserver(() => this.later());
    this.watcher.observe(this.body);
    const turn = () => this.rows.length && this.draw();
    this.narrow.addEventListener("change", turn);
    signal?.addEventListener("abort", () => {
      this.narrow.removeEventListener("change", turn);
      this.watcher.disconnect();
      this.depth.close();
    });
  }

  /** `part` says of which part of the model the rows are, where one is missing. */
  show(rows, kinds, part = this.part) {
    this.rows = rows;
    this.part = part;
    // the analyses of a running job arrive one by one: the table switches to the usual one, unless another was picked
    const usual = kinds.find((kind) => ANALYSES[kind]?.opens) ?? kinds[0];
    if (this.kind !== usual && !(this.picked && kinds.includes(this.kind))) {
      this.kind = usual;
      this.sorted = { name: null, descending: false };
    }
    replace(
      this.tabs,
      kinds.length > 1
        ? kinds.map((kind) => h("button", { type: "button", "aria-pressed": String(kind === this.kind), onclick: () => this.turnTo(kind, kinds) }, kind))
        : [],
    );
    if (!this.shown) {
      replace(
        this.place,
        h("div", { class: "row apart" }, h("div", { class: "row" }, h("h2", {}, `${unitOf(this.kind, true)}s`), this.count), h("div", { class: "row" }, this.tabs, this.search)),
        this.picture,
        h("div", { class: "layer-split" }, this.left, this.beside),
      );
      this.shown = true;
    }
    // below a short table there is room for the spectrum
    const home = this.ofKind().length > SHORT ? this.beside : this.left;
    if (this.spectra.parentNode !== home) home.append(this.spectra);
    this.prepare();
    this.draw();
    const known = rows.find((row) => row.ordinal === this.chosen);
    this.mark(known?.ordinal ?? this.ofKind()[0]?.ordinal ?? rows[0].ordinal);
  }

  turnTo(kind, kinds) {
    this.kind = kind;
    this.picked = true;
    this.sorted = { name: null, descending: false };
    this.show(this.rows, kinds);
    this.tabs.querySelector('[aria-pressed="true"]')?.focus();
  }

  sort(column) {
    const again = (this.sorted.name ?? this.columns[0].name) === column.name;
    this.sorted = { name: column.name, descending: again ? !this.sorted.descending : !column.text };
    this.draw();
  }

  ofKind() {
    return this.rows.filter((row) => row.kind === this.kind);
  }

  /** Marks the row of a layer, and shows its details. */
  mark(ordinal) {
    this.chosen = ordinal;
    for (const line of this.lines.values()) this.dress(line);
    this.depth.mark(ordinal);
    const same = this.rows.filter((row) => row.ordinal === ordinal);
    showDetails(this.details, this.rows, [...same.filter((row) => row.kind === this.kind), ...same.filter((row) => row.kind !== this.kind)]);
  }

  dress(line) {
    const here = line.dataset.ordinal === String(this.chosen);
    line.toggleAttribute("data-chosen", here);
    line.querySelector("button").tabIndex = here ? 0 : -1;
  }

  choose(row) {
    this.mark(row.ordinal);
    this.bring(row);
    this.select(row);
  }

  /** Scrolls the table, and only that, to a row. */
  bring(row) {
    const place = this.kept.findIndex((each) => each.ordinal === row.ordinal);
    if (place < 0) return;
    const head = this.body.querySelector("thead")?.offsetHeight ?? 0;
    const top = place * this.height;
    if (top < this.body.scrollTop) this.body.scrollTop = top;
    else if (top + this.height + head > this.body.scrollTop + this.body.clientHeight) this.body.scrollTop = top + this.height + head - this.body.clientHeight;
    this.paint();
  }

  /** Arrow keys go from one name to the next. */
  type(event) {
    const line = event.target.closest("tbody tr");
    const at = line ? this.kept.findIndex((row) => String(row.ordinal) === line.dataset.ordinal) : -1;
    const page = Math.max(1, Math.floor(this.body.clientHeight / this.height) - 2);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -this.kept.length, End: this.kept.length };
    if (at < 0 || !(event.key in steps)) return;
    event.preventDefault();
    const row = this.kept[Math.min(this.kept.length - 1, Math.max(0, at + steps[event.key]))];
    this.choose(row);
    this.lines.get(row)?.querySelector("button").focus({ preventScroll: true });
  }

  /** Takes what does not change with order and filter: columns and their texts, and the picture. */
  prepare() {
    const rows = this.ofKind();
    const unit = unitOf(this.kind);
    this.all = columnsOf(this.kind, rows);
    this.texts = new Map(this.all.map((column) => [column, new Map(rows.map((row) => [row, this.write(row, column)]))]));
    this.largest = new Map(this.all.filter((column) => column.relative).map((column) => [column, rows.reduce((most, row) => Math.max(most, column.value(row) ?? 0), 0)]));
    this.depth.show(rows, this.all, unit);
    this.search.placeholder = `Filter ${unit}s`;
    this.search.setAttribute("aria-label", `Filter ${unit}s by name`);
    this.body.setAttribute("aria-label", `${unitOf(this.kind, true)} table`);
    this.place.setAttribute("aria-label", `${unitOf(this.kind, true)}s`);
  }

  draw() {
    const rows = this.ofKind();
    const unit = unitOf(this.kind);
    const columns = this.all;
    const sorting = columns.find((column) => column.name === this.sorted.name) ?? columns[0];
    const metric = columns.find((column) => column.name === this.depth.metric);
    // where it is narrow the metric of the picture stands beside the name
    this.columns = this.narrow.matches && metric ? [columns[0], metric, ...columns.slice(1).filter((column) => column !== metric)] : columns;
    this.kept = rows.filter((row) => !this.filter || nameOf(row).toLowerCase().includes(this.filter) || row.module?.toLowerCase().includes(this.filter));
    this.kept.sort(compare(sorting, this.sorted.descending));
    const shown = this.kept.length === rows.length ? `${number(rows.length)}` : `${number(this.kept.length)} of ${number(rows.length)}`;
    this.count.textContent = this.part ? `${shown}, figures ${this.part}` : shown;
    this.lines = new Map();
    const head = this.columns.map((column) => {
      const sort = sorting === column ? (this.sorted.descending ? "descending" : "ascending") : "none";
      return h(
        "th",
        { scope: "col", class: column.text ? "" : "numeric", "aria-sort": sort },
        h("button", { type: "button", class: "sort", title: column.title, onclick: () => this.sort(column) }, column.name),
      );
    });
    this.before = h("tbody", { "aria-hidden": true });
    this.middle = h("tbody", { onclick: (event) => this.click(event) });
    this.after = h("tbody", { "aria-hidden": true });
    const table = h(
      "table",
      { class: "layers", "aria-rowcount": this.kept.length + 1 },
      h("caption", { class: "hidden-label" }, `${unitOf(this.kind, true)}s, analysis ${this.kind}`),
      h("colgroup", {}, this.widths(rows)),
      h("thead", {}, h("tr", {}, head)),
      this.before,
      this.middle,
      this.after,
    );
    table.style.setProperty("--row", `${this.height}px`);
    const place = this.body.scrollTop;
    const focused = this.body.contains(document.activeElement) ? document.activeElement : null;
    const [held, line] = [focused?.closest("thead th")?.textContent, focused?.closest("[data-ordinal]")?.dataset.ordinal];
    replace(this.body, table, this.kept.length ? null : h("p", { class: "muted pad" }, rows.length ? `No ${unit} has this name.` : `No ${unit} has been measured yet.`));
    this.body.scrollTop = place;
    this.paint();
    // rows that arrive while someone reads must not take the focus away
    if (held) [...table.tHead.rows[0].cells].find((cell) => cell.textContent === held)?.firstChild.focus({ preventScroll: true });
    else if (line) this.middle.querySelector(`[data-ordinal="${line}"] button`)?.focus({ preventScroll: true });
  }

  /** A width for each column, since a table of which a part is drawn cannot measure its own; the height of a row beside. */
  widths(rows) {
    const widest = this.narrow.matches ? WIDEST_NAME_NARROW : WIDEST_NAME;
    const longest = (texts, least) => texts.reduce((most, text) => Math.max(most, text.length), least);
    return this.columns.map((column, place) => {
      const texts = rows.filter((row) => row.status !== "declared" || column.fixed || !place).map((row) => this.text(row, column));
      const head = column.name.length * SANS + 26;
      let width = Math.max(head, longest(texts, 1) * SANS + 18);
      if (!place) {
        const name = longest(texts, 1);
        this.height = texts.reduce((most, text) => Math.max(most, name > widest ? linesOf(text, widest) : 1), 1) * LINE + PADDING;
        width = Math.max(head, Math.min(name, widest) * MONO + 26);
      }
      const col = h("col", {});
      col.style.width = `${Math.ceil(width)}px`;
      return col;
    });
  }

  text(row, column) {
    return this.texts.get(column).get(row);
  }

  write(row, column) {
    return column.show ? column.show(row) : String(column.text ? (column.value(row) ?? "–") : number(column.value(row)));
  }

  click(event) {
    const line = event.target.closest("tr");
    const row = line && this.kept.find((each) => String(each.ordinal) === line.dataset.ordinal);
    if (row && !getSelection().toString()) this.choose(row);
  }

  later() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.paint();
    });
  }

  /** Draws the rows in sight and some beyond; those that stay are left in place, with the focus. */
  paint() {
    if (!this.kept) return;
    const count = this.kept.length;
    const all = count <= WHOLE;
    // the window's height and not the table's own, which depends on the rows that are drawn
    const room = Math.ceil(innerHeight / this.height);
    const top = Math.floor(this.body.scrollTop / this.height / STRIDE) * STRIDE;
    const first = all ? 0 : Math.max(0, Math.min(count - room, top) - BEYOND);
    const last = all ? count : Math.min(count, first + room + 2 * BEYOND + STRIDE);
    if (this.painted === this.middle && this.first === first && this.last === last) return;
    [this.painted, this.first, this.last] = [this.middle, first, last];
    this.space(this.before, first);
    this.space(this.after, count - last);
    const wanted = this.kept.slice(first, last).map((row, place) => this.lineOf(row, first + place));
    const keep = new Set(wanted);
    for (const line of [...this.middle.rows]) if (!keep.has(line)) line.remove();
    let next = this.middle.firstChild;
    for (const line of wanted) {
      if (line === next) next = next.nextSibling;
      else this.middle.insertBefore(line, next);
    }
  }

  space(part, rows) {
    const cell = h("td", { colspan: this.columns.length });
    cell.style.height = `${rows * this.height}px`;
    replace(part, rows ? h("tr", { class: "space" }, cell) : null);
  }

  lineOf(row, place) {
    if (!this.lines.has(row)) {
      const line = this.line(row);
      this.dress(line);
      this.lines.set(row, line);
    }
    const line = this.lines.get(row);
    line.setAttribute("aria-rowindex", place + 2);
    return line;
  }

  line(row) {
    const name = h(
      "th",
      { scope: "row", class: "cell-layer" },
      h("button", { type: "button", class: "layer-name mono" }, this.height > LINE + PADDING ? nameOf(row).split(BREAKS).flatMap((part) => [part, h("wbr")]) : nameOf(row)),
      row.status === "zero_curvature" ? h("span", { class: "tag" }, "zero curvature") : null,
    );
    const attributes = { "data-ordinal": row.ordinal, "data-status": row.status };
    if (row.status === "declared") {
      const known = this.narrow.matches ? [] : this.columns.filter((column) => column.fixed);
      const why = h("td", { colspan: this.columns.length - 1 - known.length, class: "cell-why" }, h("span", { class: "tag" }, "not covered"), ` ${words(row.reason ?? "")}`);
      return h("tr", attributes, name, known.map((column) => h("td", { class: column.text ? "" : "numeric" }, this.text(row, column))), why);
    }
    return h("tr", attributes, name, this.columns.slice(1).map((column) => this.cell(row, column)));
  }

  cell(row, column) {
    const text = this.text(row, column);
    if (column.text) return h("td", { class: "small" }, text);
    const value = column.value(row);
    let share = null;
    if (column.share) share = column.share(row);
    else if (column.relative && value !== null) share = value / (this.largest.get(column) || 1);
    const width = Math.min(1, Math.max(0, share));
    const bar = share === null ? null : h("span", { class: "small-bar", title: percent(width), share: width });
    const note = column.note?.(row);
    return h("td", { class: "numeric" }, text, note ? h("span", { class: "star", title: note, role: "note", "aria-label": note }, "*") : null, bar);
  }
}
