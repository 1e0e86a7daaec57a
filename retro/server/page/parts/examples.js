// Buttons that fill a form with the beginning of a document that was held out of the datastore. The best example is the first.

import { get, whenServed } from "../lib/api.js";
import { element, language } from "../lib/elements.js";
import { percent } from "../lib/numbers.js";

const CHUNKS = 6; // enough to show where neighbors help
const LONGEST_NAME = 36;
const NONE = { held_out: false, examples: [] };

let loaded = null;
const load = () => (loaded ??= get(`examples?${new URLSearchParams({ count: 3, chunks: CHUNKS })}`).catch(() => NONE));

/**
 * Fill a form's `.examples` with buttons. A form with `data-prompt` gets only the beginning of a passage.
 *
 * @param {HTMLFormElement} form
 * @returns {Promise<string>} the best example's text; empty if no document is held out, or the server lacks what `data-opens`
 *   names: `retrieval`, a model that reads neighbors, or `trace`, a datastore that can be traced
 */
export function offerExamples(form) {
  const group = form.querySelector(".examples");
  return new Promise((resolve) => {
    whenServed(async ({ model, trace }) => {
      const { held_out: heldOut, examples } = await load();
      const buttons = examples.map((example) => {
        const use = ({ currentTarget: { value } }) => {
          form.elements.text.value = value;
          form.requestSubmit();
        };
        const text = "prompt" in form.dataset ? example.prompt : example.text;
        const [name, gain] = [nameOf(example), example.gain > 0 ? element("span", { class: "helped" }, ` −${percent(example.gain)}`) : ""];
        return element("button", { type: "button", title: example.document_id, value: text, click: use, ...language(name) }, ...inFolder(name), gain);
      });
      group.replaceChildren(element("span", {}, heldOut ? "Not in the datastore:" : "In the datastore (finds itself):"), ...buttons);
      group.hidden = !buttons.length;
      markExample(form);
      const lacking = { retrieval: !model?.retrieval, trace: !trace }[form.dataset.opens];
      resolve(heldOut && !lacking ? (buttons[0]?.value ?? "") : "");
    });
  });
}

/** Mark the button of a text. @param {HTMLFormElement} form @param {string} text by default the form's */
export function markExample(form, text = form.elements.text.value) {
  for (const button of form.querySelectorAll(".examples button")) {
    button.setAttribute("aria-pressed", String(button.value === text));
  }
}

/** A path as folder and file: narrow screens show the file alone. */
function inFolder(name) {
  const end = name.lastIndexOf("/") + 1;
  return end && end < name.length ? [element("span", { class: "folder" }, name.slice(0, end)), name.slice(end)] : [name];
}

/** The id if it is a path, otherwise the title, the text's heading in Markdown, or the id; the end of what is too long. */
function nameOf({ title, document_id: id, text }) {
  if (id.includes("/")) return id.length > LONGEST_NAME ? `…${id.slice(1 - LONGEST_NAME)}` : id;
  const name = title || /^#+ (.+)/u.exec(text)?.[1] || id || text;
  return name.length > LONGEST_NAME ? `${name.slice(0, LONGEST_NAME - 1)}…` : name;
}
