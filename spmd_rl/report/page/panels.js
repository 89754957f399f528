// The charts, as the data describes them: lines of a metric of a run, with label and colour.

const EVALUATION = /^eval\//;
const OTHER_TIME = "time/other"; // no column has it
const PHASES = ["rollout", "train", "sync", "sleep", "wake", "eval"];

function panelsOf(data) {
  return data.charts.map((chart) => ({
    ...chart,
    series: chart.lines.map((line) => ({ ...line, ...lineOf(data.runs[line.run], line.metric) })),
  }));
}

// The values and points of a metric. Those of evaluations are far apart, and yet a line.
function lineOf(run, metric) {
  const { columns, latest } = run.curves,
    values = metric === OTHER_TIME ? otherTime(columns) : columns[metric];
  const line = { ...values, ...pointsOf(run), latest: latest[metric] ?? null };
  if (metric === OTHER_TIME && latest["time/step"] !== undefined)
    line.latest = Math.max(0, latest["time/step"] - PHASES.reduce((sum, phase) => sum + (latest[`time/${phase}`] || 0), 0));
  return EVALUATION.test(metric) ? withoutGaps(line) : line;
}

// The points that have a value, so that a line connects them.
function withoutGaps(line) {
  const known = (values) => values && values.filter((_, i) => line.mean[i] !== null);
  const ends = Object.fromEntries(Object.entries(line.ends).map(([axis, values]) => [axis, known(values)]));
  const { mean, low, high, first, last, latest } = line;
  return { sparse: true, latest, mean: known(mean), low: known(low), high: known(high), first: known(first), last: known(last), ends };
}

// The steps and axis positions of a run's points.
function pointsOf({ curves }) {
  return { first: curves.first, last: curves.last, ends: curves.ends };
}

// The time of a step outside all phases.
function otherTime(columns) {
  const phases = PHASES.map((phase) => columns[`time/${phase}`]).filter(Boolean);
  const mean = columns["time/step"].mean.map((whole, i) =>
    whole === null ? null : Math.max(0, whole - phases.reduce((sum, p) => sum + (p.mean[i] || 0), 0)),
  );
  return { mean };
}

// The metrics that need no chart, as they never change.
function constantLine(texts) {
  if (!texts.length) return null;
  return el("p", { class: "sub constant" }, `Constant throughout: ${texts.join(" · ")}.`);
}

const MAX_OPEN = 6; // charts that a narrow screen shows before it is asked for all

function curvesSection(data, view) {
  const panels = panelsOf(data);
  if (!panels.length && !data.constant.length)
    return section(
      "curves",
      "Curves",
      "",
      [],
      empty("No step has finished yet: ", el("code", {}, "metrics.jsonl"), " is empty."),
    );
  const slider = el("input", {
    type: "range",
    min: 0,
    max: 20,
    step: 1,
    value: view.smoothing,
    input: () => {
      view.smoothing = Number(slider.value);
      view.redraw();
    },
  });
  const reset = el("button", { click: () => view.zoom(null) }, "whole run");
  const grid = el(
    "div",
    { class: "charts" },
    panels.map((panel) => new Chart(panel, view).node),
  );
  const most = Math.max(...data.runs.map((run) => run.curves.num_steps)),
    points = Math.max(...data.runs.map((run) => run.curves.first.length));
  const note =
    points < most ? `each point is the mean of ${Math.ceil(most / points)} steps, the band their lowest and highest value` : "";
  const hint = "drag to zoom, click to go to a step" + (note ? `; ${note}` : "");
  return section(
    "curves",
    "Curves",
    hint,
    [
      data.runs.length > 1 ? runButtons(data, view) : null,
      axisChoice(data, view),
      el("label", {}, "smoothing", slider),
      reset,
    ],
    grid,
    panels.length > MAX_OPEN ? moreCharts(grid, panels.length, view) : null,
    constantLine(data.constant),
  );
}

// A narrow screen shows the first charts; a button there shows all.
function moreCharts(grid, count, view) {
  const button = el(
    "button",
    {
      class: "more",
      click: () => {
        grid.classList.remove("folded");
        button.remove();
        view.redraw();
      },
    },
    `show all ${count} charts`,
  );
  grid.classList.add("folded");
  return button;
}

function runButtons(data, view) {
  return el(
    "div",
    { class: "runs" },
    data.runs.map((run, i) => {
      const button = el(
        "button",
        {
          "aria-pressed": "true",
          "--key": `var(--c${i})`,
          click: () => {
            if (!view.hidden.delete(i)) view.hidden.add(i);
            button.setAttribute("aria-pressed", String(!view.hidden.has(i)));
            view.redraw();
          },
        },
        run.name,
      );
      return button;
    }),
  );
}
