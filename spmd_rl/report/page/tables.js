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
  return (FORMATS[figure.metric] || number)(value === null ? null : value.value);
}

// The standard error of a figure, where it is known.
function errorText(figure, value) {
  if (value === null || value.error === null) return "";
  return ` ± ${(FORMATS[figure.metric] || number)(Number(value.error.toPrecision(2)))}`;
}

function unitOf(data, figure) {
  return FORMATS[figure.metric] ? "" : data.metrics[figure.metric].unit;
}

function howText(figure, run) {
  if (figure.how === "last fifth")
    return run.num_latest > 1 ? `mean of the last ${number(run.num_latest)} steps` : "last step";
  return { total: "over all steps", largest: "largest of all steps", median: "median step", last: "last evaluation" }[figure.how];
}

// A card has room for seven digits.
function cardText(figure, value) {
  return FORMATS[figure.metric] || Math.abs(value.value) < 1e7 ? figureText(figure, value) : short(value.value);
}

function figureCards(data, run) {
  const compared = run.figures[data.figures.findIndex((figure) => figure.metric === COMPARED)];
  const cards = data.figures.map((figure, i) => {
    const value = run.figures[i],
      isProof = figure.metric === MISMATCHED;
    if (value === null) return isProof && compared && compared.value === 0 ? card(figure, value, "", "no tokens compared") : null;
    const exact = isProof && compared && compared.value > 0 && value.value === 0,
      mood = exact ? "good" : isProof && value.value > 0 ? "bad" : "";
    const how = exact ? "trainer and engine agree bit for bit" : howText(figure, run);
    return card(figure, value, `${errorText(figure, value)} ${unitOf(data, figure)}`.trim(), how, mood);
  });
  return el("div", { class: "cards section" }, cards);
}

function card(figure, value, unit, how, mood = "") {
  return el(
    "div",
    { class: "card figure", title: `${figure.metric}: ${figureText(figure, value)}` },
    el("div", { class: "label" }, figure.label),
    el("div", { class: `value ${mood}` }, el("span", {}, value === null ? "–" : cardText(figure, value)), el("small", {}, unit)),
    el("div", { class: "how" }, how),
  );
}

// What became of each run, and which differ beyond their noise.
function comparisonSection(data) {
  return el(
    "section",
    { id: "changes" },
    el(
      "div",
      { class: "answers-first" },
      answerCard("How the runs differ", data.comparisons, "No score that two of the runs have was measured with its noise."),
      data.runs.map((run) =>
        answerCard(
          `What changed in ${run.name}`,
          run.changes.filter(({ text, mood }) => text && mood),
          "Nothing rose or fell beyond its noise.",
        ),
      ),
    ),
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
          `${figureText(figure, value)}${errorText(figure, value)} ${value === null ? "" : unitOf(data, figure)}`,
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

// The settings of each run: those that differ from their defaults first, then all.
function settingsSection(data) {
  const search = el("input", {
    type: "search",
    placeholder: "find a setting",
    "aria-label": "find a setting",
    input: () => {
      const word = search.value.toLowerCase();
      for (const row of body.querySelectorAll("[data-key]")) row.hidden = !row.dataset.key.includes(word);
      if (word) for (const all of body.querySelectorAll("details.all")) all.open = true;
    },
  });
  const body = el("div", { class: "two" }, data.runs.map((run) => runSettings(run, data.runs.length > 1)).flat());
  return section("settings", "Config and plan", "what was set, all settings, and the plan as resolved", [search], body);
}

function runSettings(run, isOneOfSeveral) {
  const of = isOneOfSeveral ? ` of ${run.name}` : "",
    all = Object.entries(run.settings),
    set = run.defaults ? all.filter(([key]) => key in run.defaults) : [];
  const config = all.length
    ? el(
        "div",
        { class: "card settings" },
        set.length ? el("h3", {}, `Set for this run${of}`) : null,
        set.length ? settingsTable(["setting", "value", "default"], set, run.defaults) : null,
        el(
          "details",
          { class: "all" },
          el("summary", {}, `all ${all.length} settings of config.toml${of}`),
          settingsTable(["setting", "value"], all, null, run.defaults || {}),
        ),
      )
    : empty("config.toml sets nothing.");
  if (all.length && !set.length) config.querySelector("details").open = innerWidth > 640;
  return [config, el("div", { class: "card tree" }, tree(`${isOneOfSeveral ? "plan" : "plan.json"}${of}`, run.plan, true))];
}

function settingsTable(titles, entries, defaults, marked = {}) {
  const rows = entries.map(([key, value]) =>
    el(
      "tr",
      { "data-key": `${key} ${value}`.toLowerCase(), class: key in marked ? "set" : "" },
      el("th", { class: "mono" }, key),
      el("td", { class: "mono" }, value),
      defaults ? el("td", { class: "mono default" }, defaults[key] ?? "–") : null,
    ),
  );
  return el("table", {}, el("thead", {}, el("tr", {}, titles.map((title) => el("th", {}, title)))), el("tbody", {}, rows));
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
