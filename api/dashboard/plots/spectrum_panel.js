// The spectrum of one layer at a time, beside the facts of its reproducibility record.

import { ANALYSES } from "../scripts/analyses.js";
import { get } from "../scripts/api.js";
import { h, replace } from "../scripts/dom.js";
import { condition, distinctNames, number } from "../scripts/format.js";
import { drawSpectrum } from "./spectrum.js";

const LATE_MS = 300;
const OPTION_WIDTH = 36; // characters that a closed list shows

function facts(row) {
  const record = row.record ?? {};
  const clipped = (count, size) => (count === null || count === undefined ? "–" : `${number(count)} of ${number(size)}`);
  const lines = [
    ["Kind of layer", row.module],
    ["Branch", record.branch, record.why],
    ["Condition of A, G", `${condition(record.kappa_A, record.clipped_A)}, ${condition(record.kappa_G, record.clipped_G)}`],
    ["Damping λ_A, λ_G", `${number(record.lambda_A)}, ${number(record.lambda_G)}`],
    ["Clipped in A", clipped(record.clipped_A, record.in_dim)],
    ["Clipped in G", clipped(record.clipped_G, record.out_dim)],
    ["Positions, terms", `${number(record.positions)}, ${number(record.terms)}`],
  ];
  return h("dl", { class: "facts column" }, lines.map(([name, value, title]) => h("div", { title }, h("dt", {}, name), h("dd", {}, value ?? "–"))));
}

export class SpectrumPanel {
  constructor(place, base, signal, mark) {
    this.place = place;
    this.base = base;
    this.signal = signal;
    this.mark = mark;
    this.rows = [];
    this.wanted = null;
  }

  /** Lists every covered layer with a kept spectrum, and opens the one that was chosen, or the first. */
  async show(artifacts, rows) {
    const kept = new Set((artifacts ?? []).map((file) => file.name));
    const seen = new Map();
    for (const row of rows) {
      if (!kept.has(`spectra/${row.ordinal}.json`)) continue;
      // the record of an analysis that read the spectrum says more than the collection's
      if (!seen.has(row.ordinal) || ANALYSES[row.kind]?.damped !== false) seen.set(row.ordinal, row);
    }
    this.rows = [...seen.values()].sort((a, b) => a.ordinal - b.ordinal);
    if (!this.rows.length) return;
    this.select = h(
      "select",
      { "aria-label": "Layer", class: "mono", onchange: () => this.open(this.rows[this.select.selectedIndex]) },
      distinctNames(this.rows.map((row) => row.layer || "(model)"), OPTION_WIDTH).map((name, place) => h("option", { title: this.rows[place].layer }, name)),
    );
    this.plot = h("div", { class: "plot" });
    this.facts = h("div", { class: "plot-facts" });
    const step = (by) => () => this.open(this.rows[(this.select.selectedIndex + by + this.rows.length) % this.rows.length]);
    replace(
      this.place,
      h(
        "section",
        { class: "card stack tight", "aria-label": "Spectrum", id: "spectrum" },
        h(
          "div",
          { class: "row apart" },
          h("h2", {}, "Spectrum of A and G"),
          h(
            "div",
            { class: "row tight-row" },
            h("button", { type: "button", class: "step", "aria-label": "Previous layer", onclick: step(-1) }, "‹"),
            this.select,
            h("button", { type: "button", class: "step", "aria-label": "Next layer", onclick: step(1) }, "›"),
          ),
        ),
        h("div", { class: "plot-row" }, this.plot, this.facts),
      ),
    );
    await this.open(this.rows.find((row) => row.ordinal === this.wanted) ?? this.rows[0]);
  }

  async open(row, bringIntoView = false) {
    // layers can be chosen in the table before it is known here whose spectra were kept
    this.wanted = row.ordinal;
    const index = this.rows.findIndex((candidate) => candidate.ordinal === row.ordinal);
    if (index < 0) return;
    const shown = this.rows[index];
    this.select.selectedIndex = index;
    this.mark(shown.ordinal);
    replace(this.facts, facts(shown));
    if (bringIntoView) this.place.firstElementChild.scrollIntoView({ block: "nearest", behavior: "smooth" });
    clearTimeout(this.late);
    // the layer before must not pass for this one
    this.late = setTimeout(() => replace(this.plot, h("p", { class: "muted pad" }, "…")), LATE_MS);
    try {
      const spectrum = await get(`${this.base}/artifacts/spectra/${shown.ordinal}.json?direct=false`, this.signal);
      if (this.select.selectedIndex !== index) return;
      clearTimeout(this.late);
      drawSpectrum(this.plot, spectrum, shown.record?.kappa_max, this.signal);
    } catch (error) {
      if (this.signal.aborted || this.select.selectedIndex !== index) return;
      clearTimeout(this.late);
      replace(this.plot, h("p", { class: "muted pad", role: "alert" }, error.message));
    }
  }
}
