// What changed in a run: sentences, and evaluation prompts that turned right or wrong.

function changesSection(run) {
  if (!run.changes.length && !run.turned.length) return null;
  return el(
    "section",
    { id: "changes", class: "section" },
    el("h2", {}, "What changed"),
    el(
      "ul",
      {},
      run.changes.map(({ mood, text }) => el("li", { class: mood }, text)),
      run.turned.map(turnedItem),
    ),
    run.turned.some(({ examples }) => examples.length) ? examplesTable(run.turned) : null,
  );
}

function turnedItem({ set, first, last, num_prompts, num_right, num_wrong }) {
  const counts = `${number(num_right)} of ${number(num_prompts)} prompts turned right, and ${number(num_wrong)} turned wrong`;
  return el("li", {}, `Evaluation ${set}, from step ${first} to ${last}: ${counts}`);
}

function examplesTable(turned) {
  const rows = turned.flatMap(({ set, examples }) =>
    examples.map((one) =>
      el(
        "tr",
        {},
        el("td", {}, set),
        el("td", {}, one.prompt),
        el("td", {}, one.answer),
        el("td", {}, one.before),
        el("td", { class: one.change > 0 ? "good" : "bad" }, one.after),
      ),
    ),
  );
  const titles = ["set", "prompt", "answer", "first evaluation", "last evaluation"];
  return el(
    "details",
    {},
    el("summary", {}, "Prompts that turned"),
    el("table", {}, el("tr", {}, titles.map((title) => el("th", {}, title))), rows),
  );
}
