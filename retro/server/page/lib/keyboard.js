// Keyboard navigation in a group of items: one Tab stop; arrow keys, Home and End move within it (WAI-ARIA: roving tabindex).

const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };

/**
 * @param {HTMLElement} group
 * @param {string} selector selects the items; one has tabindex 0, the others have -1
 * @param {(item: HTMLElement) => void} [moved] called with the newly focused item
 */
export function roving(group, selector, moved = () => {}) {
  group.addEventListener("keydown", (event) => {
    const items = [...group.querySelectorAll(selector)].filter((item) => item.checkVisibility());
    const next = target(items, items.indexOf(document.activeElement), event);
    if (!next) return;
    event.preventDefault();
    next.focus();
    moved(next);
  });
  group.addEventListener("focusin", ({ target: item }) => {
    if (!item.matches(selector)) return;
    group.querySelector(`${selector}[tabindex="0"]`)?.setAttribute("tabindex", "-1");
    item.setAttribute("tabindex", "0");
  });
}

function target(items, at, { key, ctrlKey, metaKey, altKey }) {
  if (at < 0 || ctrlKey || metaKey || altKey) return null;
  if (key === "Home") return items[0];
  if (key === "End") return items.at(-1);
  return steps[key] ? items[(at + steps[key] + items.length) % items.length] : null;
}
