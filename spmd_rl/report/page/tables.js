// Tables: key figures, settings and plan.

const percent = (value) => (value === null ? "–" : `${Number((100 * value).toPrecision(3))} %`);
const FORMATS = {
  "time/step": duration,
  "reward/solve_none": percent,
  "perf/mfu": percent,
  "perf/controller_share": percent,
};

const MISMATCHED = "onpolicy/mismatched_tokens",
  COMPARED = "onpolicy/compared_tokens";

function figureText(figure, value) {
  return (FORMATS[figure.metric] || number)(value);
}

function unitOf(data, figure) {
  return FORMATS[figure.metric] ? "" : data.metrics[figure.metric].unit;
}

function howText(figure, run) {
  if (figure.how === "mean of last 5 %")
    return run.num_latest > 1 ? `mean of the last ${number(run.num_latest)} steps` : "last step";
  return { total: "over all steps", largest: "largest of all steps", median: "median step", last: "last evaluation" }[figure.how];
}

// A card has room for seven digits.
function cardText(figure, value) {
  return FORMATS[figure.metric] || Math.abs(value) < 1e7 ? figureText(figure, value) : short(value);
}

function figureCards(data, run) {
  const compared = run.figures[data.figures.findIndex((figure) => figure.metric === COMPARED)];
  const cards = data.figures.map((figure, i) => {
    const value = run.figures[i],
      isProof = figure.metric === MISMATCHED;
    if (value === null) return isProof && compared === 0 ? card(figure, value, "", "no tokens compared") : null;
    const exact = isProof && compared > 0 && value === 0,
      mood = exact ? "good" : isProof && value > 0 ? "bad" : "";
    const how = exact ? "trainer and engine agree bit for bit" : howText(figure, run);
    return card(figure, value, unitOf(data, figure), how, mood);
  });
  return el("div", { class: "cards" }, cards);
}

function card(figure, value, unit, how, mood = "") {
  return el(
    "div",
    { class: "card figure", title: `${figure.metric}: ${figureText(figure, value)}` },
    el("div", { class: "label" }, figure.label),
    el("div", { class: `value ${mood}` }, el("span", {}, cardText(figure, value)), el("small", {}, unit)),
    el("div", { class: "how" }, how),
  );
}

// Key figures of several runs. A value that is clearly the best of its row is highlighted.
function figuresTable(data) {
  const rows = data.figures.map((figure, i) => {
    const values = data.runs.map((run) => run.figures[i]);
    if (values.every((v) => v === null)) return null;
    return el(
      "tr",
      {},
      el("th", { title: figure.metric }, `${figure.label} (${figure.how})`),
      values.map((value, run) =>
        el(
          "td",
          { class: run === figure.winner ? "good" : "" },
          `${figureText(figure, value)} ${value === null ? "" : unitOf(data, figure)}`,
        ),
      ),
    );
  });
  const steps = el(
    "tr",
    {},
    el("th", {}, "steps"),
    data.runs.map((run) => el("td", {}, number(run.curves.num_steps))),
  );
  const wall = el(
    "tr",
    {},
    el("th", {}, "wall time"),
    data.runs.map((run) => el("td", {}, duration(run.wall_s))),
  );
  return table("numbers", ["", ...data.runs.map((run) => run.name)], [steps, wall, ...rows.filter(Boolean)]);
}

function differencesTable(data) {
  if (!data.differences.length) return empty("All runs have the same settings.");
  return table(
    "",
    ["setting", ...data.runs.map((run) => run.name)],
    data.differences.map(([key, values]) =>
      el(
        "tr",
        { class: "differs" },
        el("th", { class: "mono" }, key),
        values.map((value) => el("td", { class: "mono" }, value === null ? "–" : value)),
      ),
    ),
  );
}

function table(kind, titles, rows) {
  return el(
    "div",
    { class: "card scroll" },
    el(
      "table",
      { class: kind },
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          titles.map((title) => el("th", {}, title)),
        ),
      ),
      el("tbody", {}, rows),
    ),
  );
}

function settingsSection(data) {
  const search = el("input", {
    type: "search",
    placeholder: "find a setting",
    "aria-label": "find a setting",
    input: () => {
      for (const row of body.querySelectorAll("[data-key]"))
        row.hidden = !row.dataset.key.includes(search.value.toLowerCase());
    },
  });
  const body = el(
    "div",
    { class: "two" },
    data.runs
      .map((run) => {
        const rows = Object.entries(run.settings).map(([key, value]) =>
          el(
            "tr",
            { "data-key": `${key} ${value}`.toLowerCase() },
            el("th", { class: "mono" }, key),
            el("td", { class: "mono" }, value),
          ),
        );
        const config = rows.length
          ? table("", [data.runs.length > 1 ? run.name : "config.toml", ""], rows)
          : empty("config.toml sets nothing.");
        return [
          config,
          el(
            "div",
            { class: "card tree" },
            tree(data.runs.length > 1 ? `plan of ${run.name}` : "plan.json", run.plan, true),
          ),
        ];
      })
      .flat(),
  );
  return section("settings", "Config and plan", "as given, and as resolved", [search], body);
}

// Nested data as a tree that can be unfolded.
function tree(key, value, open) {
  const isLeaf = value === null || typeof value !== "object",
    name = el("span", { class: "k" }, `${key} `);
  if (isLeaf) return el("div", {}, name, String(value));
  const items = Object.entries(value);
  if (!items.length) return el("div", {}, name, Array.isArray(value) ? "[]" : "{}");
  if (items.length <= 16 && items.every(([, item]) => typeof item === "number"))
    return el("div", {}, name, items.map(([k, v]) => (Array.isArray(value) ? v : `${k}=${v}`)).join(", "));
  const node = el("details", {}, el("summary", {}, `${key}${Array.isArray(value) ? ` (${items.length})` : ""}`));
  const unfold = () => {
    if (node.children.length === 1) node.append(...items.map(([k, v]) => tree(k, v, false)));
  };
  node.addEventListener("toggle", unfold);
  if (open) {
    node.open = true;
    unfold();
  }
  return node;
}
