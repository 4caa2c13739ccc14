// Forks as a tree: each session below the one that it was forked from.

/**
 * Nodes `{line, forks}` without an origin that is known, in the order of `lines`; forks from old to new, as they
 * grew. A session whose origin was deleted, or is on a page that was not read yet, stands by itself.
 */
export function treeOf(lines) {
  const nodes = new Map(lines.map((line) => [line.id, { line, forks: [] }]));
  const roots = [];
  for (const node of nodes.values()) {
    const origin = nodes.get(node.line.parent);
    if (origin && !descends(origin, node, nodes)) origin.forks.unshift(node);
    else roots.push(node);
  }
  return roots;
}

/** Whether `node` is `other` or one of its forks: a store that says so of both would make a ring. */
function descends(node, other, nodes) {
  const met = new Set();
  for (let at = node; at && !met.has(at); at = nodes.get(at.line.parent)) {
    if (at === other) return true;
    met.add(at);
  }
  return false;
}
