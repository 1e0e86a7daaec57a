// Group texts that are almost equal, so that a list shows each once.

const LEAST_SHARE = 0.8; // of the pieces of two texts
const PIECE = 5; // characters

/**
 * Group items by text: each group begins with an item that is no near copy of an earlier group's first item.
 *
 * @template Item
 * @param {Item[]} items
 * @param {(item: Item) => string} textOf
 * @returns {Item[][]}
 */
export function groupedCopies(items, textOf) {
  const groups = [];
  for (const item of items) {
    const pieces = piecesOf(textOf(item));
    const group = groups.find((each) => share(each.pieces, pieces) >= LEAST_SHARE);
    if (group) group.items.push(item);
    else groups.push({ pieces, items: [item] });
  }
  return groups.map((group) => group.items);
}

/** True if two texts are almost equal. @param {string} one @param {string} other @returns {boolean} */
export const isNearCopy = (one, other) => share(piecesOf(one), piecesOf(other)) >= LEAST_SHARE;

function piecesOf(text) {
  const characters = Array.from(text.replace(/\s+/gu, " ").trim());
  const length = Math.max(1, characters.length - PIECE + 1);
  return new Set(Array.from({ length }, (_, start) => characters.slice(start, start + PIECE).join("")));
}

/** Jaccard similarity of two sets. */
function share(one, other) {
  const common = [...one].filter((piece) => other.has(piece)).length;
  return common / Math.max(1, one.size + other.size - common);
}
