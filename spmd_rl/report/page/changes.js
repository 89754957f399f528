// The first screen: what improved, what did not, and what to do next. Below: prompts that turned right or wrong.

function changesSection(run) {
  const of = (...moods) => run.changes.filter(({ mood, text }) => text && moods.includes(mood));
  const advice = [...new Set(run.changes.flatMap((one) => one.advice))];
  const notes = [...of(""), ...run.turned.map(turnedNote)];
  return el(
    "section",
    { id: "changes" },
    el(
      "div",
      { class: "answers-first" },
      answerCard("What improved", of("good", "mixed"), "Nothing rose beyond its noise, or nothing was measured twice."),
      answerCard("What did not", of("bad", "flat"), "Nothing fell, stood still or asks for a look."),
      answerCard(
        "What to do next",
        advice.map((text) => ({ mood: "", text })),
        "Nothing: no score or warning asks for a change.",
      ),
    ),
    notes.length
      ? el(
          "details",
          { class: "notes" },
          el("summary", {}, `Also: ${notes[0].text}${notes.length > 1 ? `, and ${notes.length - 1} more` : ""}`),
          notes.length > 1 ? findingList(notes.slice(1)) : null,
          run.turned.some(({ examples }) => examples.length) ? examplesTable(run.turned) : null,
        )
      : null,
  );
}

function answerCard(title, findings, otherwise) {
  return el(
    "div",
    { class: "card finding" },
    el("h2", {}, title),
    findings.length ? findingList(findings) : el("p", { class: "sub" }, otherwise),
  );
}

function findingList(findings) {
  return el("ul", {}, findings.map(({ mood, text }) => el("li", { class: mood }, withLinks(text))));
}

// Words between backticks as code, and pages of docs/ as links where they lie beside this page's folder.
function withLinks(text) {
  return text.split(/(`[^`]+`|docs\/[\w-]+\.md(?:#[\w-]+)?)/).map((part, i) => {
    if (i % 2 === 0) return part;
    if (part.startsWith("`")) return el("code", {}, part.slice(1, -1));
    return data.docs ? el("a", { href: data.docs + part }, part) : part;
  });
}

function turnedNote({ set, first, last, num_prompts, num_right, num_wrong }) {
  const counts = `${number(num_right)} of ${number(num_prompts)} prompts turned right, and ${number(num_wrong)} turned wrong`;
  return { mood: "", text: `Evaluation ${set}, from step ${first} to ${last}: ${counts}` };
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
  return table("", ["set", "prompt", "answer", "first evaluation", "last evaluation"], rows);
}
