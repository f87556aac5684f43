// The layer table: one analysis at a time, sortable by every column, with small bars.

import { h, replace } from "./dom.js";
import { bytes, condition, number, percent, seconds, words } from "./format.js";

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

const metric = (key, name, title, more = {}) => ({ key, name, title, value: (row) => row.metrics?.[key] ?? null, ...more });

const side = (name, key, heading, title) => ({
  name: heading,
  title,
  value: (row) => row.metrics?.[name]?.[key] ?? null,
  ...(key === "clipped" ? { share: (row) => (row.metrics?.[name]?.clipped ?? 0) / (row.metrics?.[name]?.size || 1) } : {}),
});

/** A figure of the layer's eigenvalues, K-FAC's or EK-FAC's. */
const spectral = (name, title, figure, more = {}) => ({
  name,
  title,
  value: (row) => {
    const of = row.metrics?.kfac ?? row.metrics?.ekfac;
    return of ? (figure(of) ?? null) : null;
  },
  ...more,
});

/** The standard error of a factor over batches, shown where a layer has one. */
const noise = (name) => ({
  name: `Noise of ${name}`,
  title: `Standard error of ${name} over batches, relative to its Frobenius norm`,
  value: (row) => row.record?.[`relative_standard_error_${name}`] ?? null,
  optional: true,
});

/** A note on a metric whose value has not converged over the sample sizes. */
function late(row, key) {
  const followed = row.metrics?.convergence?.find((each) => each.metric === key);
  return followed?.not_converged ? `not converged: extrapolates to ${number(followed.extrapolation)}` : null;
}

/** The figures of one α of a natural gradient; with several α each heading says which, and fewer are shown. */
const direction = (power, several) => {
  const mark = several ? ` α=${number(power)}` : "";
  const of = (row) => row.metrics?.directions?.find((each) => each.power === power);
  const figure = (key, name, title, more = {}) => ({ name: `${name}${mark}`, title, value: (row) => of(row)?.[key] ?? null, ...more });
  const alone = [
    figure("largest", "Largest number", "The number of d that is largest in magnitude; its place is in the note", {
      note: (row) => (of(row)?.largest_parameter ? `${of(row).largest_parameter}[${of(row).largest_index.join(", ")}]` : null),
    }),
  ];
  return [
    ...(several ? [] : [figure("norm", "‖d‖", "Length of the direction d = F^(−α) g")]),
    figure("cosine", several ? "Cos" : "Cosine", "gᵀd / (‖g‖ ‖d‖): how far the curvature turns the gradient", {
      show: (row) => (of(row)?.cosine == null ? "–" : of(row).cosine.toFixed(3)),
      share: (row) => Math.max(of(row)?.cosine ?? 0, 0),
    }),
    figure("effective_step", "Step", "gᵀd / gᵀg: the learning rate with which plain gradient descent goes as far along g"),
    ...(several ? [] : alone),
    ...(power === 1 ? [figure("residual", "Residual", "‖F d − g‖ / ‖g‖ with F damped, for α = 1")] : []),
  ];
};

/** Columns by the powers that a job asked for: the same ones at every drawing, since a table is sorted by one of them. */
const DIRECTIONS = new Map();

function directionColumns(rows) {
  const powers = rows.find((row) => row.metrics?.directions)?.metrics.directions.map((each) => each.power) ?? [];
  const key = powers.join(" ");
  if (!DIRECTIONS.has(key)) {
    const gradient = metric("gradient_norm", "‖g‖", "Length of the gradient");
    const several = powers.length > 1;
    const own = powers.flatMap((power) => direction(power, several));
    DIRECTIONS.set(key, several ? [LAYER, SIZE, PARAMETERS, gradient, ...own] : [LAYER, SIZE, PARAMETERS, gradient, ...own, SECONDS]);
  }
  return DIRECTIONS.get(key);
}
/** A number of a factor, or of G ⊗ A, of a layer that is compared with another set's. */
const compared = (name, key, heading, title, more = {}) => ({ name: heading, title, value: (row) => row.metrics?.[name]?.[key] ?? null, ...more });

const overlapAt = (row, k) => row.metrics?.product?.overlaps?.find((each) => each.k === k) ?? null;

/** The overlap of the leading k eigenvectors, with the reason where there is none. */
const overlap = (k) => ({
  name: `k = ${k}`,
  title: `Overlap ‖Uᵀ V‖² / k of the ${k} leading eigenvectors of G ⊗ A in both sets: 1 where they span the same, 0 where they are orthogonal`,
  value: (row) => overlapAt(row, k)?.overlap ?? null,
  share: (row) => overlapAt(row, k)?.overlap ?? null,
  note: (row) => overlapAt(row, k)?.why ?? null,
});

const overlaps = (rows) => [...new Set(rows.flatMap((row) => (row.metrics?.product?.overlaps ?? []).map((each) => each.k)))].map(overlap);

const COLUMNS = {
  compare_curvature: [
    LAYER,
    SIZE,
    PARAMETERS,
    compared("product", "relative_distance", "Distance", "‖F₁ − F₂‖ / ‖F₂‖ of G ⊗ A, by Frobenius norm; the bar compares layers", { relative: true }),
    compared("A", "relative_distance", "of A", "‖A₁ − A₂‖ / ‖A₂‖ by Frobenius norm"),
    compared("G", "relative_distance", "of G", "‖G₁ − G₂‖ / ‖G₂‖ by Frobenius norm"),
    compared("product", "cosine", "Cosine", "⟨F₁, F₂⟩ / (‖F₁‖ ‖F₂‖): likeness whatever the scales"),
    compared("product", "trace_log_ratio", "Trace shift", "ln(tr F₁ / tr F₂)"),
    compared("product", "divergence", "KL", "Kullback-Leibler divergence of the damped Gaussians, in nats", { note: (row) => row.metrics?.product?.why ?? row.metrics?.why ?? null }),
    SECONDS,
  ],
  capacity: [
    LAYER,
    SIZE,
    PARAMETERS,
    metric("effective_dimension", "Effective dim.", "Σ λᵢ/(λᵢ + λ): directions with more curvature than the damping; the bar is their share of all directions", {
      share: (row) => row.metrics?.effective_dimension_share ?? null,
    }),
    metric("effective_rank", "Effective rank", "Exponential of the spectrum's entropy; the bar is its share of all directions", {
      share: (row) => (row.metrics?.effective_rank ?? 0) / (row.metrics?.dimension || 1),
      note: (row) => late(row, "effective_rank"),
    }),
    { name: "Decay", title: "Exponent α of λ_k ∝ k^−α", value: (row) => row.metrics?.decay?.exponent ?? null },
    metric("trace", "Trace", "Sum of all eigenvalues of F = G ⊗ A; the bar compares layers", { relative: true }),
    metric("kappa", "κ", "λ_max/λ_min of F; ∞ where F is singular", {
      show: (row) => condition(row.metrics?.kappa, row.metrics?.rank),
    }),
    SECONDS,
  ],
  reconstruction: [
    LAYER,
    SIZE,
    PARAMETERS,
    side("A", "clipped", "Clipped A", "Eigenvalues of A below λ_max/κ_max; the bar is their share"),
    side("G", "clipped", "Clipped G", "Eigenvalues of G below λ_max/κ_max; the bar is their share"),
    side("A", "kappa_reached", "κ of A", "Condition number of A after clipping"),
    side("G", "kappa_reached", "κ of G", "Condition number of G after clipping"),
    side("A", "relative_error", "Error of A", "Relative distance from Q max(Λ, f) Qᵀ"),
    side("G", "relative_error", "Error of G", "Relative distance from Q max(Λ, f) Qᵀ"),
    SECONDS,
  ],
  factors: [
    LAYER,
    SIZE,
    PARAMETERS,
    metric("trace_A", "Trace of A", "Sum of the eigenvalues of A", { relative: true }),
    metric("trace_G", "Trace of G", "Sum of the eigenvalues of G", { relative: true }),
    metric("exact_trace", "Exact trace", "Trace of the layer's block of the exact curvature, from each example's squared gradient", { relative: true }),
    metric("trace_ratio", "K-FAC / exact", "K-FAC's trace, tr(A)·tr(G), over the exact trace"),
    noise("A"),
    noise("G"),
    metric("calls", "Calls", "Calls of the module in one forward pass"),
    { name: "Size", title: "Bytes of the dense factors", value: (row) => row.record?.factor_bytes ?? null, show: (row) => bytes(row.record?.factor_bytes) },
    metric("shared_A_with", "A shared with", "Layer that reads the same input", { text: true }),
    SECONDS,
  ],
  spectrum: [
    LAYER,
    SIZE,
    PARAMETERS,
    spectral("Trace", "Sum of the eigenvalues of the layer's block; the bar compares layers", (of) => of.trace, { relative: true }),
    spectral("λ_max", "Largest eigenvalue of the layer's block", (of) => of.largest[0]?.value),
    spectral("λ_min", "Smallest eigenvalue of the layer's block", (of) => of.smallest[0]?.value),
    spectral("Zeros", "Eigenvalues below the rounding of the largest; the bar is their share", (of) => of.zeros, {
      share: (row) => ((row.metrics?.kfac ?? row.metrics?.ekfac)?.zeros ?? 0) / (row.metrics?.dimension || 1),
    }),
    SECONDS,
  ],
};

function columnsOf(kind, rows) {
  if (kind === "natural_gradient") return directionColumns(rows);
  if (kind === "compare_curvature") {
    const [layer, size, parameters, ...rest] = COLUMNS[kind];
    return [layer, size, parameters, ...overlaps(rows), ...rest];
  }
  if (COLUMNS[kind]) return COLUMNS[kind].filter((column) => !column.optional || rows.some((row) => column.value(row) !== null));
  const sample = rows.find((row) => row.metrics)?.metrics ?? {};
  const keys = Object.keys(sample).filter((key) => typeof sample[key] === "number").slice(0, 6);
  return [LAYER, SIZE, PARAMETERS, ...keys.map((key) => metric(key, words(key), key)), SECONDS];
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
    const usual = kinds.find((kind) => kind === "capacity") ?? kinds[0];
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
    this.descending = this.column === column ? !this.descending : !column.text;
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
      const sort = this.column === column ? (this.descending ? "descending" : "ascending") : "none";
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
    const bar = share === null ? null : h("span", { class: "small-bar", title: percent(share, 2) }, h("span", { share: Math.min(1, Math.max(0, share)) }));
    const note = column.note?.(row);
    return h("td", { class: "numeric" }, text, note ? h("span", { class: "star", title: note, role: "note", "aria-label": note }, "*") : null, bar);
  }
}
