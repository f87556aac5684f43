// The devices of the service's workers, with their memory, refreshed while they are shown.

import { allPages } from "./api.js";
import { h, replace, unpressed } from "./dom.js";
import { age, bytes, clock, number, several, words } from "./format.js";
import { bar } from "./progress.js";

const EVERY_MS = 5_000;

function row(device) {
  // a device with a job is shown with that, though another may wait for it already
  const state = device.reserved && device.state === "free" ? "reserved" : device.state;
  const used = device.capacity_bytes ? (device.leased_bytes + device.foreign_bytes) / device.capacity_bytes : 0;
  const held = [`${bytes(device.leased_bytes)} leased`, device.foreign_bytes ? `${bytes(device.foreign_bytes)} held by others` : null, `${bytes(device.free_bytes)} free`];
  return h(
    "tr",
    {},
    h("td", {}, device.node),
    h("td", {}, device.name, h("span", { class: "under mono" }, device.uuid)),
    h("td", {}, words(state)),
    h("td", { class: "cell-progress" }, h("div", { class: "progress-line" }, bar(Math.min(1, used), `Memory in use on ${device.name}`), h("span", { class: "figure" }, bytes(device.capacity_bytes))), h("span", { class: "under" }, held.filter(Boolean).join(" · "))),
    h("td", { class: "numeric" }, number(device.jobs)),
    h("td", { title: clock(device.seen_at) }, age(device.seen_at)),
  );
}

export async function showDevices(main, signal) {
  document.title = "Devices · Kronoscope";
  const body = h("div", {});
  const said = h("p", { class: "muted small", role: "status" });
  let timer = 0;
  signal.addEventListener("abort", () => clearTimeout(timer));
  async function load() {
    const devices = await allPages("/v1/devices", signal);
    await unpressed();
    if (signal.aborted) return;
    const heads = ["Node", "Device", "State", "Memory", "Jobs", "Seen"];
    const busy = devices.filter((each) => each.jobs).length;
    said.textContent = `${several(devices.length, "device")}, ${number(busy)} with a job. Jobs of all tenants are counted.`;
    replace(
      body,
      devices.length
        ? h("div", { class: "card flush scroll", role: "region", tabindex: 0, "aria-label": "Table of devices" }, h("table", { class: "devices" }, h("caption", { class: "hidden-label" }, "Devices, by node"), h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col", class: head === "Jobs" ? "numeric" : null }, head)))), h("tbody", {}, devices.map(row))))
        : h("div", { class: "empty" }, h("p", {}, "No worker has registered a device yet; ", h("code", {}, "kronoscope worker"), " starts one.")),
    );
  }
  const again = () => {
    timer = setTimeout(async () => {
      if (!document.hidden) await load().catch((error) => signal.aborted || (said.textContent = `${error.message} Trying again.`));
      if (!signal.aborted) again();
    }, EVERY_MS);
  };
  await load();
  signal.throwIfAborted();
  replace(main, h("div", { class: "stack" }, h("div", { class: "row apart" }, h("h1", {}, "Devices"), said), body));
  again();
}
