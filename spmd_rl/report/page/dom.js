// Elements and numbers. Every text on the page goes through `el`, which makes only text nodes of it.

const SVG = "http://www.w3.org/2000/svg";

function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(key, value);
    else if (key.startsWith("--")) node.style.setProperty(key, value);
    else if (key === "paint") Object.assign(node.style, value);
    else if (value !== null && value !== false) node.setAttribute(key, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

// The value of a colour variable of the style sheet, for a canvas.
function colour(name) {
  const probe = el("i", { paint: { color: `var(${name})` }, hidden: "" });
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) || size >= 10000) return Math.round(value).toLocaleString("en-US");
  if (size < 0.001) return value.toExponential(2);
  return Number(value.toPrecision(digits)).toLocaleString("en-US", { maximumFractionDigits: 6 });
}

function short(value) {
  const size = Math.abs(value);
  for (const [scale, letter] of [
    [1e9, "G"],
    [1e6, "M"],
    [1e3, "k"],
  ]) {
    if (size >= 10 * scale || (size >= scale && letter !== "k"))
      return `${Number((value / scale).toPrecision(3))}${letter}`;
  }
  if (size > 0 && size < 0.001) return value.toExponential(0);
  return String(Number(value.toPrecision(4)));
}

// A number of things, such as "1 sample" and "8 samples".
function count(size, thing) {
  return `${number(size)} ${thing}${size === 1 ? "" : "s"}`;
}

function duration(seconds) {
  if (seconds === null) return "–";
  if (seconds < 100) return `${number(Number(seconds.toPrecision(3)))} s`;
  const minutes = Math.floor(seconds / 60),
    hours = Math.floor(minutes / 60),
    days = Math.floor(hours / 24);
  if (days > 1) return `${days} d ${hours % 24} h`;
  return hours ? `${hours} h ${minutes % 60} min` : `${minutes} min ${Math.round(seconds % 60)} s`;
}

function microseconds(us) {
  if (us >= 1e6) return `${number(Number((us / 1e6).toPrecision(4)))} s`;
  return us >= 1e3 ? `${Number((us / 1e3).toPrecision(4))} ms` : `${Number(us.toPrecision(4))} µs`;
}

// Round numbers that cover `low` to `high` in about `count` steps.
function ticks(low, high, count) {
  const raw = (high - low) / count || 1,
    scale = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * scale).find((s) => s >= raw * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i ? i * step : 0); // no -0
  return found;
}

// A list to choose from, with buttons for the previous and the next. `options` are [value, text].
function picker(name, options, chosen, onPick) {
  const select = el("select", { "aria-label": name, change: () => go(select.selectedIndex) });
  options.forEach(([value, text]) => select.append(el("option", { value }, text)));
  const back = el("button", { "aria-label": `previous ${name}`, click: () => go(select.selectedIndex - 1) }, "‹");
  const forth = el("button", { "aria-label": `next ${name}`, click: () => go(select.selectedIndex + 1) }, "›");
  function go(index, quiet) {
    select.selectedIndex = index;
    back.disabled = index <= 0;
    forth.disabled = index >= options.length - 1;
    if (!quiet) onPick(options[index][0]);
  }
  go(
    Math.max(
      0,
      options.findIndex(([value]) => value === chosen),
    ),
    true,
  );
  return el("span", { class: "picker" }, el("span", { class: "name" }, name), back, select, forth);
}

function section(id, title, note, tools, ...content) {
  const head = el(
    "div",
    { class: "head" },
    el("h2", {}, title),
    el("span", { class: "note" }, note),
    el("div", { class: "tools" }, tools),
  );
  return el("section", { id, class: "section" }, head, ...content);
}

function empty(...content) {
  return el("div", { class: "card empty" }, ...content);
}
