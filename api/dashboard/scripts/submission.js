// The page of a new job: an editor for its document, in JSON or YAML, with the faults that the service finds.

import { estimate, fullId, get, submit } from "./api.js";
import { h, replace } from "./dom.js";
import { bytes, jobName, seconds } from "./format.js";
import { asJson } from "./yaml.js";

/** The position in `text` at which the field of a JSON pointer begins; -1 where it is not found. */
export function placeOf(text, pointer) {
  const steps = pointer.split("/").slice(1).map((step) => step.replaceAll("~1", "/").replaceAll("~0", "~"));
  let from = 0;
  for (const step of steps) {
    const quoted = text.indexOf(JSON.stringify(step), from);
    const bare = new RegExp(`(?<=^|[\\s{,])${step.replace(/[^\w]/g, "\\$&")}(?=\\s*:)`, "m").exec(text.slice(from));
    const at = quoted < 0 && bare ? from + bare.index : quoted;
    if (at < 0) return /^\d+$/.test(step) ? from : -1;
    from = at;
  }
  return steps.length ? from : -1;
}

function problems(error, editor) {
  const items = error.errors.map((fault) => {
    const place = placeOf(editor.value, fault.pointer ?? "");
    const name = fault.pointer || fault.parameter || "document";
    const label =
      place < 0
        ? h("code", {}, name)
        : h(
            "button",
            {
              type: "button",
              class: "pointer mono",
              title: "Show it in the document",
              onclick: () => {
                const end = editor.value.indexOf("\n", place);
                editor.focus();
                editor.setSelectionRange(place, end < 0 ? editor.value.length : end);
              },
            },
            name,
          );
    return h("li", {}, label, h("span", {}, fault.message));
  });
  return h(
    "div",
    { class: "notice bad", role: "alert" },
    h("strong", {}, error.title || "Not accepted"),
    items.length ? h("ul", { class: "faults" }, items) : h("p", {}, error.message),
  );
}

/** The figures of a plan: whether it fits, its bytes, its seconds, and the budget that would do. */
function planned(plan) {
  const sizes = (of) => ["device", "host", "disk"].filter((place) => of?.[place]).map((place) => `${bytes(of[place])} on the ${place}`).join(", ");
  const facts = [
    ["At its peak", sizes(plan.peak)],
    ["Time", plan.seconds_range ? `${seconds(plan.seconds)} (${plan.seconds_range.map(seconds).join(" to ")})` : ""],
    ["Smallest budget", sizes(plan.smallest_budget)],
  ].filter(([, value]) => value);
  return h(
    "div",
    { class: plan.fits ? "notice good" : "notice warn" },
    h("strong", {}, plan.fits ? "The job fits. Nothing was started." : plan.fits === null ? "The estimate was cancelled." : "The job does not fit as it is."),
    h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    plan.why ? h("p", { class: "small" }, plan.why) : null,
  );
}

/** The document of a job, for another one like it; a deadline is left out. */
async function documentOf(shownId, signal) {
  const job = await get(`/v1/jobs/${encodeURIComponent(await fullId(shownId, signal))}`, signal);
  return { title: `Job ${jobName(job)} again`, document: { ...job.document, labels: job.labels, ...(job.name ? { name: job.name } : {}), ...(job.priority ? { schedule: { priority: job.priority } } : {}) } };
}

export async function showSubmission(main, signal, again) {
  document.title = "New job · Kronoscope";
  const menu = await get("/v1/analyses", signal);
  const examples = [...(again ? [await documentOf(again, signal)] : []), ...menu.examples];
  signal.throwIfAborted(); // another view may be shown by now
  const answer = h("div", { class: "stack tight", "aria-live": "polite" });
  const editor = h("textarea", { id: "document", spellcheck: "false", autocapitalize: "off", "aria-describedby": "document-help" });
  editor.value = JSON.stringify(examples[0].document, null, 2);
  const select = h(
    "select",
    {
      id: "example",
      onchange: () => {
        editor.value = JSON.stringify(examples[select.selectedIndex].document, null, 2);
        replace(answer);
      },
    },
    examples.map((example) => h("option", {}, example.title)),
  );
  const buttons = [];

  async function send(what) {
    for (const button of buttons) button.disabled = true;
    replace(answer, what === "estimate" ? h("p", { class: "muted" }, "A worker plans the job…") : null);
    try {
      const text = asJson(editor.value);
      const job = what === "estimate" ? await estimate(text, signal) : await submit(text, what === "check");
      if (signal.aborted) return;
      if (what === "estimate") replace(answer, planned(job));
      else if (what === "check") replace(answer, h("div", { class: "notice good" }, h("strong", {}, "The document is valid."), h("p", {}, "Nothing was stored.")));
      else location.hash = `#/jobs/${encodeURIComponent(job.id)}`;
    } catch (error) {
      if (!signal.aborted) replace(answer, problems(error, editor));
    } finally {
      for (const button of buttons) button.disabled = false;
    }
  }

  buttons.push(
    h("button", { type: "submit", class: "primary" }, "Submit job"),
    h("button", { type: "button", onclick: () => send("estimate") }, "Estimate"),
    h("button", { type: "button", onclick: () => send("check") }, "Check only"),
  );
  const form = h(
    "form",
    {
      class: "split",
      onsubmit: (event) => {
        event.preventDefault();
        send("submit");
      },
    },
    h(
      "div",
      { class: "stack tight" },
      h("div", { class: "row apart" }, h("label", { for: "document" }, "Job document"), h("div", { class: "row" }, h("label", { for: "example", class: "muted" }, "Example"), select)),
      editor,
      h("div", { class: "row" }, buttons),
    ),
    h(
      "aside",
      { class: "stack" },
      answer,
      h(
        "div",
        { class: "card stack tight", id: "document-help" },
        h("h2", {}, "The job document"),
        h("p", { class: "muted small" }, "JSON, or YAML without aliases and tags. It names the analyses, the model, the data and the task; a few-shot training takes data alone. Everything else has a default."),
        h("h3", { class: "label" }, "Analyses"),
        h("dl", { class: "menu" }, menu.items.flatMap((item) => [h("dt", {}, h("code", {}, item.kind)), h("dd", {}, item.description)])),
      ),
    ),
  );
  replace(main, h("div", { class: "stack" }, h("h1", {}, "New job"), form));
}
