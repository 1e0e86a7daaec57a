// Filters on the documents' metadata: rows of a column and a value. Rows of one column are alternatives, columns must all fit.

import { whenServed } from "./api.js";
import { element } from "./elements.js";

/**
 * Make the rows work; their fields are named `column` and `value`, so a form and an address hold them in order.
 *
 * @param {HTMLElement} group holds `.rows` and a button to add one
 * @param {HTMLFormElement} form
 */
export function filterRows(group, form) {
  const rows = group.querySelector(".rows");
  const add = (columns) => rows.append(row(columns));
  whenServed(({ filters }) => {
    group.hidden = filters.length === 0;
    group.querySelector("button").addEventListener("click", () => {
      add(filters);
      rows.lastElementChild.querySelector("select").focus();
    });
  });
  form.addEventListener("restore", ({ detail: parameters }) => {
    const names = parameters.getAll("column");
    rows.replaceChildren(...names.map((name) => row([name])));
    whenServed(({ filters }) => rows.querySelectorAll("select").forEach((select) => offer(select, filters)));
  });
}

/**
 * Filters of a form as the API takes them. A value is what it looks like: 12 a number, true a truth value, "12" a text.
 *
 * @param {URLSearchParams} values
 * @returns {Record<string, unknown>}
 */
export function chosenFilters(values) {
  const filters = {};
  const given = values.getAll("value");
  values.getAll("column").forEach((column, number) => (filters[column] ??= []).push(typed(given[number] ?? "")));
  return filters;
}

function typed(text) {
  const quoted = /^"(.*)"$/s.exec(text);
  if (quoted) return quoted[1];
  if (text === "true" || text === "false") return text === "true";
  return text.trim() && Number.isFinite(Number(text)) ? Number(text) : text;
}

function row(columns) {
  const select = element("select", { name: "column", "aria-label": "Column" });
  offer(select, columns);
  const line = element(
    "div",
    { class: "filter" },
    select,
    element("span", { "aria-hidden": "true" }, "is"),
    element("input", { name: "value", required: true, "aria-label": "Value" }),
    element("button", { type: "button", class: "quiet", "aria-label": "Remove this filter", click: () => line.remove() }, "×"),
  );
  return line;
}

/** Give a select the columns there are, and keep what is chosen. */
function offer(select, columns) {
  const chosen = select.value;
  select.replaceChildren(...[...new Set([chosen, ...columns])].filter(Boolean).map((column) => element("option", {}, column)));
  if (chosen) select.value = chosen;
}
