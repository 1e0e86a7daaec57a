// A form with its values in the address: submitting writes the address; an address with a text fills and submits the form.
// Once a question is asked, the form shrinks to a line with the text and a button to change it.

import { writeAddress } from "../lib/address.js";
import { element, language } from "../lib/elements.js";
import { counted } from "../lib/numbers.js";
import { offerExamples } from "./examples.js";

/**
 * @param {HTMLFormElement} form has a `textarea` named `text`, and the parts `.asked`, `.inputs` and `.examples`
 * @param {string} view name of the view in the address
 * @param {(values: URLSearchParams) => void} run
 * @returns {(parameters: URLSearchParams) => void} shows the view with the parameters of an address
 */
export function queryForm(form, view, run) {
  let shown = "";

  const start = (values) => {
    shown = values.toString();
    shrink(form, values.get("text"));
    run(values);
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const values = new URLSearchParams(new FormData(form));
    writeAddress(view, values, values.toString() === shown ? "replaceState" : "pushState");
    start(values);
    showResults(form);
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  offerExamples(form);

  return (parameters) => {
    if (!parameters.get("text")) {
      if (shown) writeAddress(view, new URLSearchParams(shown), "replaceState");
    } else if (parameters.toString() !== shown) {
      form.dispatchEvent(new CustomEvent("restore", { detail: parameters }));
      restore(form, parameters);
      start(parameters);
    }
  };
}

function shrink(form, text) {
  const [asked, inputs] = [form.querySelector(".asked"), form.querySelector(".inputs")];
  const grow = () => {
    [asked.hidden, inputs.hidden] = [true, false];
    form.elements.text.focus();
  };
  asked.replaceChildren(
    element("p", language(text), text.trim().replace(/\s+/gu, " ")),
    element("span", { class: "label" }, counted(Array.from(text).length, "character")),
    element("button", { type: "button", click: grow }, "Change text or settings"),
  );
  [asked.hidden, inputs.hidden] = [false, true];
  form.classList.add("answered"); // Leaves room below, so that the page can scroll before the answer is there.
}

/** Scroll to what the form shows now and to the results below it, and move the focus there: the button is hidden. */
function showResults(form) {
  form.scrollIntoView({ block: "start" });
  form.parentElement.querySelector(".results").focus({ preventScroll: true });
}

/** Write the n-th value of a name into the n-th field of that name. */
function restore(form, parameters) {
  for (const name of new Set(parameters.keys())) {
    const fields = form.querySelectorAll(`[name="${CSS.escape(name)}"]`);
    parameters.getAll(name).forEach((value, number) => {
      if (fields[number]) fields[number].value = value;
    });
  }
}
