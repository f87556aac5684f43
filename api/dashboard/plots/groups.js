// Groups of layers: by the block of the network that they stand in, and by the class of their modules.

import { nameOf } from "../scripts/layer_columns.js";

/** The block of a layer: its name up to the first number that has something after it, else all but its last part. */
export function blockOf(row) {
  const parts = nameOf(row).split(".");
  const at = parts.findIndex((part, place) => /^\d+$/.test(part) && place < parts.length - 1);
  return parts.slice(0, at < 0 ? Math.max(1, parts.length - 1) : at + 1).join(".");
}

export function typeOf(row) {
  return row.module || "other";
}

/** The types of rows with their counts, the most frequent first. */
export function typesOf(rows) {
  return [...Map.groupBy(rows, typeOf)].map(([name, group]) => ({ name, count: group.length })).sort((a, b) => b.count - a.count);
}

/** Rows in the order of the picture, and its bands: {name, label, from, to}; by block they keep the model's order. */
export function arrange(rows, by) {
  const ordered = [...rows].sort((a, b) => a.ordinal - b.ordinal);
  const types = typesOf(rows).map((type) => type.name);
  if (by === "type") ordered.sort((a, b) => types.indexOf(typeOf(a)) - types.indexOf(typeOf(b)) || a.ordinal - b.ordinal);
  const bands = [];
  for (const [place, row] of ordered.entries()) {
    const name = by === "type" ? typeOf(row) : blockOf(row);
    if (bands.at(-1)?.name === name) bands.at(-1).to = place + 1;
    else bands.push({ name, label: by === "type" ? name : name.split(".").at(-1), from: place, to: place + 1 });
  }
  return { ordered, bands };
}
