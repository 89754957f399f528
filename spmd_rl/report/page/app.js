// Build the page.

const data = JSON.parse(document.getElementById("data").textContent);
const several = data.runs.length > 1;
const view = new View(data.runs.map((run) => run.num_latest));
const timeline = timelineSection(data),
  samples = samplesSection(data);

function topBar() {
  const links = [
    ["curves", "Curves"],
    timeline.start ? ["timeline", "Timeline"] : null,
    samples.start ? ["samples", "Samples"] : null,
    ["settings", "Config"],
  ].filter(Boolean);
  const themes = { light: "☀ light", dark: "☾ dark", "": "◐ auto" },
    names = Object.keys(themes);
  const button = el(
    "button",
    {
      "aria-label": "colours",
      click: () => {
        const root = document.documentElement,
          next = names[(names.indexOf(root.dataset.theme || "") + 1) % names.length];
        if (next) root.dataset.theme = next;
        else delete root.dataset.theme;
        button.textContent = themes[next];
        if (timeline.redraw) timeline.redraw();
      },
    },
    themes[""],
  );
  return el(
    "nav",
    {},
    el("b", {}, data.title),
    el("div", {}, links.map(([id, text]) => el("a", { href: `#${id}` }, text))),
    button,
  );
}

function summary(run) {
  const steps = run.curves.num_steps;
  const made = new Date(data.made_unix_s * 1000).toISOString().slice(0, 16).replace("T", " ");
  return [
    `${number(steps)} ${steps === 1 ? "step" : "steps"}`,
    run.wall_s === null ? null : `in ${duration(run.wall_s)}${timeBeforeStep1(run)}`,
    `page written ${made} UTC`,
    data.reload_s ? "the run goes on, so this page reloads itself" : null,
  ]
    .filter(Boolean)
    .join(" · ");
}

// How much of the time passed before step 1, and in which phases.
function timeBeforeStep1(run) {
  const { all, ...phases } = run.before;
  if (all === undefined) return "";
  const named = Object.entries(phases)
    .filter(([, seconds]) => seconds >= 0.01 * all)
    .map(([name, seconds]) => `${duration(seconds)} of ${name}`);
  const inPhases = named.length ? `, with ${named.join(", ")}` : "";
  return ` (${duration(all)} of it before step 1${inPhases})`;
}

// Model, data, machine and versions of the run.
function facts(run) {
  const known = Object.entries(run.about);
  if (!known.length) return null;
  return el(
    "section",
    { class: "section" },
    el("div", { class: "head" }, el("h2", {}, "The run")),
    el(
      "dl",
      { class: "facts" },
      known.map(([label, text]) => el("div", {}, el("dt", {}, label), el("dd", {}, text))),
    ),
  );
}

function head() {
  if (!several)
    return [
      el("h1", {}, data.runs[0].name),
      el("p", { class: "sub" }, summary(data.runs[0])),
      changesSection(data.runs[0]),
      figureCards(data, data.runs[0]),
      facts(data.runs[0]),
    ];
  return [
    el("h1", {}, `${data.runs.length} runs`),
    el("p", { class: "sub" }, data.title),
    comparisonSection(data),
    el("div", { class: "two section" }, figuresTable(data), differencesTable(data)),
  ];
}

document.body.append(
  topBar(),
  el(
    "main",
    {},
    ...head().filter(Boolean),
    curvesSection(data, view),
    timeline.node,
    samples.node,
    settingsSection(data),
    el("footer", {}, "Written by spmd-rl report from the files of the run folder."),
  ),
);
view.onPick = (step) => {
  if (samples.go) samples.go(step);
  if (timeline.go) timeline.go(step);
};
for (const part of [timeline, samples]) if (part.start) part.start();
view.redraw();
new ResizeObserver(() => {
  view.redraw();
  if (timeline.redraw) timeline.redraw();
}).observe(document.querySelector("main"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  if (timeline.redraw) timeline.redraw();
});

// A run that goes on writes newer pages, the last one without a reload. Who is at work on this one is left alone.
if (data.reload_s) {
  const pause = 1000 * data.reload_s;
  let touched = 0;
  for (const kind of ["pointerdown", "keydown", "wheel"]) addEventListener(kind, () => (touched = Date.now()), { passive: true });
  setInterval(() => {
    if (!document.hidden && Date.now() - touched > pause) location.reload();
  }, pause);
}
