// Functions that build elements; text from the server becomes text nodes only.

export function h(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "share") node.style.setProperty("--share", String(value));
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(2)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

/** Builds an element of an SVG. */
export function svg(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes ?? {})) if (value !== null && value !== undefined) node.setAttribute(name, value);
  node.append(...children.flat(2).filter((child) => child !== null && child !== undefined));
  return node;
}

let pressed = false;
let ending = 0;
const letGo = [];

function released() {
  pressed = false;
  for (const go of letGo.splice(0)) go();
}

function press(event) {
  clearTimeout(ending);
  pressed = event.button === 0;
}

function release() {
  clearTimeout(ending);
  ending = setTimeout(released, 50); // the click event follows the end of the press
}

addEventListener("pointerdown", press, true);
for (const name of ["pointerup", "pointercancel", "contextmenu"]) addEventListener(name, release, true);
addEventListener("blur", release); // of the window alone
addEventListener("pointermove", (event) => pressed && !event.buttons && release(), true);

/** Resolves when no button is pressed: replacing an element during a click on it would lose the click. */
export async function unpressed() {
  while (pressed) await new Promise((resolve) => letGo.push(resolve));
}

export function replace(node, ...children) {
  node.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
}
