// The details of one layer, beside the table: its figures in every analysis, and the facts of its reproducibility record.

import { ANALYSES } from "./analyses.js";
import { h, replace } from "./dom.js";
import { condition, number, words } from "./format.js";
import { columnsOf, nameOf } from "./layer_columns.js";

function list(lines) {
  const known = lines.filter(([, value]) => value !== null && value !== undefined && value !== "–");
  return h("dl", { class: "pairs" }, known.map(([name, value, title]) => h("div", { title: title || null }, h("dt", {}, name), h("dd", {}, value))));
}

function facts(row) {
  const record = row.record ?? {};
  const clipped = (count, size) => (count === null || count === undefined ? null : `${number(count)} of ${number(size)}`);
  const pair = (left, right) => (left == null && right == null ? null : `${number(left)}, ${number(right)}`);
  const known = record.kappa_A != null || record.clipped_A != null;
  return [
    ["Branch", record.branch && words(record.branch), record.why],
    ["Condition of A, G", known ? `${condition(record.kappa_A, record.clipped_A)}, ${condition(record.kappa_G, record.clipped_G)}` : null],
    ["Damping λ_A, λ_G", pair(record.lambda_A, record.lambda_G)],
    ["Clipped in A", clipped(record.clipped_A, record.in_dim)],
    ["Clipped in G", clipped(record.clipped_G, record.out_dim)],
    ["Positions, terms", pair(record.positions, record.terms)],
    ["Rank of A, G at most", pair(record.rank_bound_A, record.rank_bound_G)],
  ];
}

/** Shows a layer in `place`: `same` are its rows, that of the analysis shown first; `rows` are those of all layers. */
export function showDetails(place, rows, same) {
  const [row] = same;
  if (!row) {
    replace(place);
    return;
  }
  const measured = same.filter((each) => each.status !== "declared");
  const own = measured.map((each) => {
    const columns = columnsOf(each.kind, rows.filter((other) => other.kind === each.kind)).filter((column, index) => index && !column.fixed);
    return [h("h3", { class: "label" }, ANALYSES[each.kind]?.title ?? each.kind), list(columns.map((column) => [column.name, column.show ? column.show(each) : number(column.value(each)), column.title]))];
  });
  const [size] = columnsOf(row.kind, [row]).filter((column) => column.name === "A × G");
  const missing = row.status === "declared" ? [h("p", {}, h("span", { class: "tag" }, "not covered"), ` ${words(row.reason ?? "")}`), row.record?.why && row.record.why !== row.reason ? h("p", { class: "small" }, row.record.why) : null] : [];
  replace(
    place,
    h(
      "div",
      { class: "stack tight" },
      h("h3", { class: "mono whole" }, nameOf(row)),
      missing,
      list([["Type", row.module], ["A × G", size?.show(row)], ["Parameters", number(row.parameter_count)]]),
      own.flat(),
      measured.length && ANALYSES[row.kind]?.collects !== false ? [h("h3", { class: "label" }, "Record"), list(facts(row))] : null,
      row.parameters?.length ? h("p", { class: "small mono whole muted" }, row.parameters.join(" ")) : null,
    ),
  );
}
