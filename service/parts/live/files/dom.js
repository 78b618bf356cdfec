// Helpers that build and update the page's elements.

export const $ = (id) => document.getElementById(id);

/** An element with attributes (`class`, `data-x`, ...) and children; null ones are left out. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null));
  return element;
}

/** Sets a text, and touches nothing where it is the same: what is read aloud or selected stays. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Shows items as children, one each by key; one is only made anew when its item has changed. */
export function keep(container, items, key, make) {
  const before = new Map([...container.children].map((child) => [child.dataset.key, child]));
  const wanted = items.map((item) => {
    const [name, shape] = [String(key(item)), JSON.stringify(item)];
    const old = before.get(name);
    if (old && old.shape === shape) return old;
    const made = make(item);
    made.dataset.key = name;
    made.shape = shape;
    return made;
  });
  const isSame = wanted.length === container.children.length
    && wanted.every((child, place) => container.children[place] === child);
  if (isSame) return;
  const focus = focusIn(container);
  container.replaceChildren(...wanted);
  // It would be lost each second with figures that change.
  if (focus) focusable(wanted.find((child) => child.dataset.key === focus.key))[focus.place]?.focus({ preventScroll: true });
}

/** Which of the things in a child of the container has the focus, if one has it. */
function focusIn(container) {
  const child = [...container.children].find((each) => each.contains(document.activeElement));
  return child && { key: child.dataset.key, place: focusable(child).indexOf(document.activeElement) };
}

function focusable(child) {
  return child ? [...child.querySelectorAll("a, button, summary")] : [];
}

/** Facts in a row: [name, value] pairs; those without a value are left out. */
export function showFacts(list, pairs) {
  const shown = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  keep(list, shown, ([name]) => name, ([name, value]) => h("li", {}, `${name} `, h("b", {}, value)));
}
