// A metric over the depth of a network, by block and type, above a heat map of all layers and metrics.

import { h, replace, svg } from "../scripts/dom.js";
import { decade, number, several } from "../scripts/format.js";
import { nameOf } from "../scripts/layer_columns.js";
import { arrange, typeOf, typesOf } from "./groups.js";

const HEIGHT = 190;
const TOP = 18;
const CELL = 15;
const SHADES = 9;
// values that differ by more than this factor are drawn by their logarithms
const LOG_FROM = 30;
const TYPES = 6;
const CROSS = 12;
// groups of one stripe, of which each is at least so wide
const STRIPES = [1, 2, 5, 10, 20, 50, 100, 200, 500];
const LEAST_STRIPE = 24;
// marks of the types around a point, by their size; every type has its colour and its shape
const MARKS = [
  (x, y, r) => `M${x - r},${y}a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0z`,
  (x, y, r) => `M${x - r},${y - r}h${2 * r}v${2 * r}h${-2 * r}z`,
  (x, y, r) => `M${x},${y - 1.3 * r}l${1.2 * r},${2.2 * r}h${-2.4 * r}z`,
  (x, y, r) => `M${x},${y - 1.4 * r}l${1.4 * r},${1.4 * r}l${-1.4 * r},${1.4 * r}l${-1.4 * r},${-1.4 * r}z`,
  (x, y, r) => `M${x},${y + 1.3 * r}l${1.2 * r},${-2.2 * r}h${-2.4 * r}z`,
  (x, y, r) => `M${x - r},${y - r}l${2 * r},${2 * r}M${x + r},${y - r}l${-2 * r},${2 * r}`,
];
const round = (value) => Math.round(value * 10) / 10;
let numbered = 0;

/** The scale of values: by logarithms where all that count are positive and far apart. */
export function scaleOf(values) {
  const known = values.filter((value) => typeof value === "number");
  const positive = known.filter((value) => value > 0);
  const [low, high] = [positive.reduce((a, b) => Math.min(a, b), Infinity), positive.reduce((a, b) => Math.max(a, b), 0)];
  const log = positive.length > 0 && known.every((value) => value >= 0) && high / low > LOG_FROM;
  const [least, most] = log ? [low, high] : [known.reduce((a, b) => Math.min(a, b), Infinity), known.reduce((a, b) => Math.max(a, b), -Infinity)];
  const [from, to] = log ? [Math.log10(least), Math.log10(most)] : [least, most];
  // values that differ by rounding alone are one value
  const flat = !log && to - from <= 1e-9 * Math.max(Math.abs(least), Math.abs(most));
  const share = (value) => {
    if (log && value <= 0) return 0;
    return flat ? 0.5 : ((log ? Math.log10(value) : value) - from) / (to - from);
  };
  return { log, least, most, from, to, flat, share, known: known.length };
}

/** Positions of an axis' ticks: powers of ten, or steps of 1, 2 or 5. */
function ticksOf({ log, least, from, to, flat }) {
  if (flat) return [least];
  const span = to - from;
  let step = 10 ** Math.floor(Math.log10(span / 3));
  for (const factor of [2, 2.5, 2]) if (span / step > 6) step *= factor;
  if (log) step = Math.max(1, Math.ceil(step));
  const ticks = [];
  for (let tick = Math.ceil(from / step - 1e-9); tick * step <= to + 1e-9 * span; tick += 1) ticks.push(log ? 10 ** Math.round(tick * step) : Number((tick * step).toPrecision(6)));
  return ticks;
}

export class DepthPicture {
  /** `select(row)` is called when a layer is chosen, `turned()` when another metric is. */
  constructor(place, select, turned) {
    this.place = place;
    this.select = select;
    this.turned = turned;
    this.metric = null;
    this.by = "block";
    this.at = -1;
    this.chosen = null;
    this.rows = [];
    this.number = numbered += 1;
    this.menu = h("select", { "aria-label": "Metric", onchange: () => this.turn(this.menu.value) });
    this.groups = h("div", { class: "segments", role: "group", "aria-label": "Order of the layers" }, ["block", "type"].map((by) => h("button", { type: "button", "data-by": by, onclick: () => this.group(by) }, `by ${by}`)));
    this.legend = h("div", { class: "legend" });
    this.drawing = h("div", { class: "depth", role: "slider", tabindex: 0, "aria-orientation": "horizontal", onkeydown: (event) => this.type(event) });
    this.drawing.addEventListener("pointermove", (event) => this.point(event));
    this.drawing.addEventListener("pointerleave", () => this.rest());
    this.drawing.addEventListener("click", (event) => this.click(event));
    this.readout = h("output", { class: "readout" });
    this.card = h("section", { class: "card stack tight depth-card", "aria-label": "Over depth" }, h("div", { class: "row apart" }, h("div", { class: "row" }, this.menu, this.groups), this.legend), this.drawing, this.readout);
    this.watcher = new ResizeObserver(() => this.width !== this.drawing.clientWidth && this.draw());
    this.watcher.observe(this.drawing);
  }

  close() {
    this.watcher.disconnect();
  }

  /** Shows the covered ones of `rows`; fewer than two have no depth. */
  show(rows, columns, unit) {
    this.rows = rows.filter((row) => row.status !== "declared");
    this.unit = unit;
    const counted = columns.filter((column) => !column.text && this.rows.some((row) => typeof column.value(row) === "number"));
    // what was measured before the sizes
    this.columns = [...counted.filter((column) => !column.fixed), ...counted.filter((column) => column.fixed)];
    const usual = this.columns.find((column) => column.relative) ?? this.columns[0];
    if (!this.columns.some((column) => column.name === this.metric)) this.metric = usual?.name ?? null;
    if (this.rows.length < 2 || !usual) {
      replace(this.place);
      return;
    }
    replace(this.menu, this.columns.map((column) => h("option", { selected: column.name === this.metric }, column.name)));
    if (!this.card.parentNode) replace(this.place, this.card);
    for (const button of this.groups.children) button.setAttribute("aria-pressed", String(button.dataset.by === this.by));
    this.draw();
  }

  turn(metric) {
    this.metric = metric;
    this.menu.value = metric;
    this.draw();
    this.turned();
  }

  group(by) {
    this.by = by;
    for (const button of this.groups.children) button.setAttribute("aria-pressed", String(button.dataset.by === by));
    this.draw();
  }

  mark(ordinal) {
    this.chosen = ordinal;
    this.rest();
  }

  rest() {
    const place = (this.ordered ?? []).findIndex((row) => row.ordinal === this.chosen);
    this.cross(place < 0 ? 0 : place);
  }

  draw() {
    if (!this.rows.length || !this.card.parentNode) return;
    this.width = this.drawing.clientWidth;
    const width = Math.max(260, this.width || 900);
    this.left = width < 520 ? 88 : 112;
    const { ordered, bands } = arrange(this.rows, this.by);
    this.ordered = ordered;
    this.step = (width - this.left - 8) / ordered.length;
    const column = this.columns.find((each) => each.name === this.metric);
    const types = typesOf(this.rows);
    const style = new Map(types.map((type, place) => [type.name, Math.min(place, TYPES - 1)]));
    const map = TOP + HEIGHT + 14;
    const height = map + this.columns.length * CELL + 4;
    const label = this.sentence(column, bands);
    const id = `depth-${this.number}`;
    const picture = svg(
      "svg",
      { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-labelledby": `${id}-title`, "aria-describedby": `${id}-text` },
      svg("title", { id: `${id}-title` }, `${column.name} over depth`),
      svg("desc", { id: `${id}-text` }, label),
      this.bands(bands),
      svg("rect", { class: "ground", x: this.left, y: map, width: round(this.step * ordered.length), height: this.columns.length * CELL - 2 }),
      this.curve(column, style),
      this.heat(map),
    );
    this.line = svg("rect", { class: "cross", y: TOP, width: Math.min(CROSS, Math.max(2, round(this.step))), height: height - TOP });
    picture.append(this.line);
    replace(this.drawing, picture);
    this.drawing.setAttribute("aria-label", `${column.name} of each ${this.unit}`);
    this.drawing.setAttribute("aria-describedby", `${id}-text`);
    this.drawing.setAttribute("aria-valuemin", 1);
    this.drawing.setAttribute("aria-valuemax", ordered.length);
    replace(
      this.legend,
      types.slice(0, TYPES).map((type, place) => {
        const last = place === TYPES - 1 && types.length > TYPES;
        const count = last ? types.slice(place).reduce((sum, each) => sum + each.count, 0) : type.count;
        return h("span", { class: "type-key" }, svg("svg", { width: 12, height: 12, "aria-hidden": "true" }, svg("path", { class: `mark type-${place}`, d: MARKS[place](6, 6, 4) })), `${last ? "others" : type.name} ${number(count)}`);
      }),
    );
    this.rest();
  }

  sentence(column, bands) {
    const { least, most, log, known } = scaleOf(this.ordered.map(column.value));
    const groups = this.by === "block" ? several(bands.length, "block") : several(bands.length, "type");
    return `${several(this.ordered.length, this.unit)} in ${groups}, left to right in ${this.by === "block" ? "the order of the model" : "groups of one type"}. ${column.name} of ${number(known)} from ${number(least)} to ${number(most)}${log ? ", on a logarithmic axis" : ""}. Below, each row of cells is a metric on a scale of its own: the darker, the larger.`;
  }

  /** Stripes behind every other group, or number of groups where they are narrow, with the name of the first. */
  bands(bands) {
    const mean = (this.step * this.ordered.length) / bands.length;
    const together = STRIPES.find((count) => mean * count >= LEAST_STRIPE) ?? STRIPES.at(-1);
    const parts = [];
    let free = 0;
    for (let place = 0; place < bands.length; place += together) {
      const last = bands[Math.min(bands.length, place + together) - 1];
      const [x, width] = [this.left + bands[place].from * this.step, (last.to - bands[place].from) * this.step];
      if ((place / together) % 2 === 0) parts.push(svg("rect", { class: "band", x: round(x), y: TOP, width: round(width), height: HEIGHT }));
      const { label } = bands[place];
      const middle = together > 1 ? x + (this.step * (bands[place].to - bands[place].from)) / 2 : x + width / 2;
      const room = label.length * 6.4;
      if (middle - room / 2 < free || room > Math.max(width, LEAST_STRIPE)) continue;
      free = middle + room / 2 + 5;
      parts.push(svg("text", { class: "group", x: round(middle), y: 12, "text-anchor": "middle" }, label));
    }
    return parts;
  }

  x(place) {
    return this.left + (place + 0.5) * this.step;
  }

  curve(column, style) {
    const scale = scaleOf(this.ordered.map(column.value));
    const [bottom, room] = [TOP + HEIGHT - 12, HEIGHT - 26];
    const y = (value) => bottom - room * scale.share(value);
    const axis = ticksOf(scale).map((tick) => {
      const at = round(y(tick));
      return [svg("line", { class: "grid", x1: this.left, x2: this.left + this.step * this.ordered.length, y1: at, y2: at }), svg("text", { class: "tick", x: this.left - 6, y: at + 4, "text-anchor": "end" }, scale.log ? decade(tick) : number(tick))];
    });
    const size = Math.max(1.6, Math.min(4.2, this.step * 0.42));
    const marks = new Map();
    for (const [place, row] of this.ordered.entries()) {
      const value = column.value(row);
      const infinite = value === null && column.infinite && column.show(row) === "∞";
      if (value === null && !infinite) continue;
      // what the axis cannot hold stands hollow at its end
      const off = infinite || (scale.log && value <= 0);
      const key = `mark type-${style.get(typeOf(row))}${off ? " off" : ""}`;
      const d = MARKS[style.get(typeOf(row))](round(this.x(place)), round(infinite ? TOP + 6 : off ? TOP + HEIGHT - 4 : y(value)), size);
      marks.set(key, (marks.get(key) ?? "") + d);
    }
    const name = svg("text", { class: "metric chosen", x: 0, y: TOP + 10 }, column.name);
    return [axis.flat(), [...marks].map(([key, d]) => svg("path", { class: key, d })), name, scale.log ? svg("text", { class: "metric", x: 0, y: TOP + 24 }, "log scale") : null];
  }

  heat(top) {
    const joined = this.step <= 5; // where cells are narrow there is no room between them
    const cells = new Map();
    const names = this.columns.map((column, line) => {
      const scale = scaleOf(this.ordered.map(column.value));
      const shades = this.ordered.map((row) => {
        const value = column.value(row);
        return typeof value === "number" ? Math.min(SHADES - 1, Math.floor(scale.share(value) * SHADES)) : null;
      });
      for (let place = 0, end = 1; place < shades.length; place = end, end += 1) {
        while (joined && end < shades.length && shades[end] === shades[place]) end += 1;
        if (shades[place] === null) continue;
        const long = round((end - place) * this.step - (joined ? 0 : 1));
        const d = `M${round(this.left + place * this.step)},${top + line * CELL}h${long}v${CELL - 2}h${-long}z`;
        cells.set(shades[place], (cells.get(shades[place]) ?? "") + d);
      }
      return svg("text", { class: column.name === this.metric ? "metric chosen" : "metric", x: 0, y: top + line * CELL + 10.5 }, column.name);
    });
    this.mapTop = top;
    return [[...cells].map(([shade, d]) => svg("path", { class: `shade-${shade}`, d })), names];
  }

  /** Moves the cross to a layer, and says its values. */
  cross(place, line = null) {
    const row = this.ordered?.[place];
    if (!row || !this.line) return;
    this.at = place;
    this.line.setAttribute("x", round(this.x(place) - this.line.getAttribute("width") / 2));
    const column = line === null ? this.columns.find((each) => each.name === this.metric) : line;
    const said = `${column.name} ${column.show ? column.show(row) : number(column.value(row))}`;
    replace(this.readout, h("strong", { class: "mono" }, nameOf(row)), ` ${row.module ?? ""}: ${said}`);
    this.drawing.setAttribute("aria-valuenow", place + 1);
    this.drawing.setAttribute("aria-valuetext", `${nameOf(row)}, ${said}`);
  }

  spot(event) {
    const box = this.drawing.getBoundingClientRect();
    const line = Math.floor((event.clientY - box.top - this.mapTop) / CELL);
    return { place: Math.floor((event.clientX - box.left - this.left) / this.step), column: this.columns[line] ?? null };
  }

  point(event) {
    const { place, column } = this.spot(event);
    if (place >= 0 && place < this.ordered.length) this.cross(place, column);
    this.drawing.classList.toggle("on-name", place < 0 && column !== null);
  }

  click(event) {
    const { place, column } = this.spot(event);
    if (place >= 0 && place < this.ordered.length) this.select(this.ordered[place]);
    else if (place < 0 && column) this.turn(column.name);
  }

  type(event) {
    const page = Math.max(1, Math.round(this.ordered.length / 12));
    const steps = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: page, PageDown: -page, Home: -this.ordered.length, End: this.ordered.length };
    if (!(event.key in steps)) return;
    event.preventDefault();
    this.select(this.ordered[Math.min(this.ordered.length - 1, Math.max(0, this.at + steps[event.key]))]);
  }
}
