// Entry point of the page: the address selects the view, and the tabs change the address.

import { addressOf, readAddress } from "./lib/address.js";
import { served, whenServed } from "./lib/api.js";
import * as ask from "./views/ask.js";
import * as datastore from "./views/datastore.js";
import * as documents from "./views/documents.js";
import { element } from "./lib/elements.js";
import * as generation from "./views/generation.js";
import { roving } from "./lib/keyboard.js";
import * as neighbors from "./views/neighbors.js";
import { count, roughly } from "./lib/numbers.js";
import * as passage from "./views/passage.js";
import * as trace from "./views/trace.js";

const views = { ask, neighbors, passage, generation, trace, datastore, document: documents };

const tablist = document.querySelector("[role=tablist]");
const tabs = [...tablist.querySelectorAll("[role=tab]")];

async function route() {
  const { view, id, parameters } = readAddress();
  const name = Object.hasOwn(views, view) ? view : await firstView();
  if (view !== readAddress().view) return; // The user went on meanwhile.
  for (const section of document.querySelectorAll("main > section")) section.hidden = section.id !== name;
  for (const tab of tabs) {
    const selected = tab.dataset.view === name;
    tab.setAttribute("aria-selected", String(selected));
    tab.setAttribute("tabindex", selected ? "0" : "-1");
    if (selected) document.title = `${tab.textContent} · retro`;
  }
  if (name === "document") tabs[0].setAttribute("tabindex", "0"); // No tab is selected, but Tab must reach one.
  views[name].show(parameters, id);
}

/** The view of an address that names none. */
const firstView = () => served().then(viewFor, () => "neighbors");
const viewFor = ({ model, retrieval }) => (model ? (model.chat ? "ask" : "generation") : retrieval.length ? "neighbors" : "trace");

function open({ dataset: { view } }) {
  if (view && view !== readAddress().view) location.hash = addressOf(view);
}

roving(tablist, "[role=tab]", open);
tablist.addEventListener("click", ({ target }) => open(target));
window.addEventListener("hashchange", route);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // The hash is the address of the view.
  document.querySelector("main").focus();
});

/** Apply the server's limits to the form fields, and show the names of datastore and model and the length of a chunk. */
function introduce({ datastores, model, limits, chunk_length: length }) {
  document.querySelector(".chunk-length").textContent = `, here ${length}`;
  const chunks = datastores.reduce((total, each) => total + (each.chunks ?? 0), 0);
  const names = [`datastore ${datastores.map((each) => each.name).join(", ")}`, `${count(chunks)} chunks`, model ? `model ${model.name}, ${roughly(model.parameters)} parameters` : ""];
  document.querySelector(".served").textContent = names.filter(Boolean).join(" · ");
  for (const field of document.querySelectorAll("[data-limit]")) {
    const limit = limits[field.dataset.limit];
    if (limit) field.max = limit;
    if (limit < Number(field.value)) field.value = limit;
  }
}

/** Show the error in place of the names. */
function excuse(error) {
  const again = element("button", { type: "button", class: "quiet", click: connect }, "Try again");
  document.querySelector(".served").replaceChildren(element("span", { class: "refused", role: "alert" }, error.message), again);
}

const connect = () => served().catch(excuse);

whenServed(introduce);
connect();
route();
