// Elements by hand: text always goes in as text, never as markup.

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  assign(element, attributes);
  element.append(...children);
  return element;
}

export function makeSvg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  assign(element, attributes);
  element.append(...children);
  return element;
}

function assign(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) {
      element.setAttribute(name, value);
    }
  }
}

export function ask(root, selector) {
  const found = root.querySelector(selector);
  if (!found) throw new Error(`the page has no ${selector}`);
  return found;
}

export const byId = (id) => ask(document, `#${id}`);

export function options(select, entries, chosen) {
  select.replaceChildren(
    ...entries.map(([value, label, disabled]) => make("option", { value, disabled }, label)),
  );
  select.value = chosen;
}

// Save as a file of the user's.
export function download(blob, name) {
  const link = make("a", { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
