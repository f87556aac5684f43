// The page of a new job: an editor for its document, with the faults that the service finds.

import { get, submit } from "./api.js";
import { h, replace } from "./dom.js";

/** The position in `text` at which the value of a JSON pointer begins; -1 where it is not found. */
export function placeOf(text, pointer) {
  const steps = pointer.split("/").slice(1).map((step) => step.replaceAll("~1", "/").replaceAll("~0", "~"));
  let from = 0;
  for (const step of steps) {
    const at = text.indexOf(JSON.stringify(step), from);
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

export async function showSubmission(main, signal) {
  document.title = "New job · Kronoscope";
  const menu = await get("/v1/analyses", signal);
  const examples = menu.examples;
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

  async function send(validateOnly) {
    for (const button of buttons) button.disabled = true;
    replace(answer);
    try {
      const job = await submit(editor.value, validateOnly);
      if (signal.aborted) return;
      if (validateOnly) replace(answer, h("div", { class: "notice good" }, h("strong", {}, "The document is valid."), h("p", {}, "Nothing was stored.")));
      else location.hash = `#/jobs/${encodeURIComponent(job.id)}`;
    } catch (error) {
      if (!signal.aborted) replace(answer, problems(error, editor));
    } finally {
      for (const button of buttons) button.disabled = false;
    }
  }

  buttons.push(
    h("button", { type: "submit", class: "primary" }, "Submit job"),
    h("button", { type: "button", onclick: () => send(true) }, "Check only"),
  );
  const form = h(
    "form",
    {
      class: "split",
      onsubmit: (event) => {
        event.preventDefault();
        send(false);
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
        h("p", { class: "muted small" }, "It names the analyses, the model, the data and the task. Everything else has a default."),
        h("h3", { class: "label" }, "Analyses"),
        h("dl", { class: "menu" }, menu.items.flatMap((item) => [h("dt", {}, h("code", {}, item.kind)), h("dd", {}, item.description)])),
      ),
    ),
  );
  replace(main, h("div", { class: "stack" }, h("h1", {}, "New job"), form));
}
