// The choice of one datastore to search, shown if several are served.

import { whenServed } from "../lib/api.js";
import { element } from "../lib/elements.js";

/** @param {HTMLFormElement} form has a hidden `.field` with a select named `datastore` */
export function offerDatastores(form) {
  const select = form.elements.datastore;
  const add = (name) => {
    if (![...select.options].some((option) => option.value === name)) select.append(element("option", { value: name }, name));
  };
  whenServed(({ datastores }) => {
    datastores.forEach(({ name }) => add(name));
    select.closest(".field").hidden = datastores.length < 2;
  });
  form.addEventListener("restore", ({ detail: parameters }) => {
    if (parameters.get("datastore")) add(parameters.get("datastore")); // The address may arrive before the names.
  });
}
