// Filters on the documents' metadata. Each row has a column and a value; rows of one column are combined with OR, columns with AND.

import { whenServed } from "./api.js";
import { element } from "./elements.js";

/**
 * Connect the filter rows of a form. Their fields are named `column` and `value`, so forms and addresses keep their order.
 *
 * @param {HTMLElement} group contains `.rows` and a button that adds a row
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
 * Convert a form's filters to the format of the API. Types follow the notation: 12 is a number, true a boolean, "12" a text.
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

/** Set the options of a select to the available columns and keep the selected one. */
function offer(select, columns) {
  const chosen = select.value;
  select.replaceChildren(...[...new Set([chosen, ...columns])].filter(Boolean).map((column) => element("option", {}, column)));
  if (chosen) select.value = chosen;
}
