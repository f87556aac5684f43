// The spectrum of one layer at a time.

import { ANALYSES } from "../scripts/analyses.js";
import { get } from "../scripts/api.js";
import { h, replace } from "../scripts/dom.js";
import { nameOf } from "../scripts/layer_columns.js";
import { drawSpectrum } from "./spectrum.js";

const LATE_MS = 300;

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
      this.rows.map((row) => h("option", {}, nameOf(row))),
    );
    this.plot = h("div", { class: "plot" });
    const step = (by) => () => this.open(this.rows[(this.select.selectedIndex + by + this.rows.length) % this.rows.length]);
    replace(
      this.place,
      h(
        "section",
        { class: "stack tight", "aria-label": "Spectrum", id: "spectrum" },
        h(
          "div",
          { class: "row apart" },
          h("h3", { class: "label" }, "Spectrum of A and G"),
          h(
            "div",
            { class: "row tight-row" },
            h("button", { type: "button", class: "step", "aria-label": "Previous layer", onclick: step(-1) }, "‹"),
            this.select,
            h("button", { type: "button", class: "step", "aria-label": "Next layer", onclick: step(1) }, "›"),
          ),
        ),
        this.plot,
      ),
    );
    await this.open(this.rows.find((row) => row.ordinal === this.wanted) ?? this.rows[0]);
  }

  async open(row) {
    // layers can be chosen in the table before it is known here whose spectra were kept
    this.wanted = row.ordinal;
    const index = this.rows.findIndex((candidate) => candidate.ordinal === row.ordinal);
    // without a kept spectrum of its own a layer must not stand beside another's
    this.place.hidden = this.rows.length > 0 && index < 0;
    if (index < 0) return;
    const shown = this.rows[index];
    this.select.selectedIndex = index;
    this.mark(shown.ordinal);
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
