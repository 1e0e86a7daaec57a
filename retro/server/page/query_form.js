// A form with its values in the address: submitting writes the address; an address with a text fills and submits the form.

import { writeAddress } from "./address.js";
import { EXAMPLES } from "./examples.js";

/**
 * @param {HTMLFormElement} form has a `textarea` named `text`, and buttons with `data-example`
 * @param {string} view name of the view in the address
 * @param {(values: URLSearchParams) => void} run
 * @returns {(parameters: URLSearchParams) => void} shows the view with the parameters of an address
 */
export function queryForm(form, view, run) {
  let shown = "";

  const start = (values) => {
    shown = values.toString();
    run(values);
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const values = new URLSearchParams(new FormData(form));
    writeAddress(view, values, values.toString() === shown ? "replaceState" : "pushState");
    start(values);
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  form.addEventListener("click", ({ target }) => {
    if (!target.dataset.example) return;
    form.elements.text.value = EXAMPLES[target.dataset.example];
    form.requestSubmit();
  });

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

/** Write the n-th value of a name into the n-th field of that name. */
function restore(form, parameters) {
  for (const name of new Set(parameters.keys())) {
    const fields = form.querySelectorAll(`[name="${CSS.escape(name)}"]`);
    parameters.getAll(name).forEach((value, number) => {
      if (fields[number]) fields[number].value = value;
    });
  }
}
