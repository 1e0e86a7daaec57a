// Buttons that fill a form with the beginning of a document that was held out of the datastore.

import { get, whenServed } from "../lib/api.js";
import { element, language } from "../lib/elements.js";

const CHUNKS = 6; // enough to show where neighbors help
const PROMPT = 0.45; // share of a passage that is a prompt

const NONE = { examples: [] };

let loaded = null;
const load = () => (loaded ??= get(`examples?${new URLSearchParams({ count: 3, chunks: CHUNKS })}`).catch(() => NONE));

/**
 * Fill a form's `.examples` with buttons. A form with `data-prompt` gets only the beginning of a passage.
 *
 * @param {HTMLFormElement} form
 */
export function offerExamples(form) {
  const group = form.querySelector(".examples");
  whenServed(async () => {
    const { held_out: heldOut, examples } = await load();
    if (!examples.length) return;
    const buttons = examples.map((example) => {
      const use = () => {
        form.elements.text.value = "prompt" in form.dataset ? beginning(example.text) : example.text;
        form.requestSubmit();
      };
      const name = nameOf(example);
      return element("button", { type: "button", title: example.document_id, click: use, ...language(name) }, name);
    });
    const about = heldOut ? "Try a document that was kept out of the datastore:" : "Try a document of the datastore (it finds itself):";
    group.replaceChildren(element("span", {}, about), ...buttons);
    group.hidden = false;
  });
}

/** The title, the text's heading in Markdown, or the end of the id. */
function nameOf({ title, document_id: id, text }) {
  const name = title || /^#+ (.+)/u.exec(text)?.[1] || id.split("/").at(-1) || text;
  return name.length > 40 ? `${name.slice(0, 38)}…` : name;
}

/** The first part of a text, up to a space if it has spaces. */
function beginning(text) {
  const part = text.slice(0, Math.ceil(PROMPT * text.length));
  const space = part.search(/\s+\S*$/u);
  return space > part.length / 2 ? part.slice(0, space) : part;
}
