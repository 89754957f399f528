// The x axis of the charts: steps, minutes since the run started, or trained tokens.

const AXES = {
  steps: { title: "steps", label: stepLabel, text: () => "" },
  minutes: {
    title: "wall-clock minutes",
    label: () => "minutes since the run started",
    text: (value) => `${number(value, 3)} min`,
  },
  tokens: { title: "trained tokens", label: () => "trained tokens", text: (value) => `${short(value)} tokens` },
};

// What the steps from `first` to `last` are; those of a warm-up count up to 0.
function stepLabel(first, last) {
  if (last < 1 && first < 0) return "step of the warm-up, which ends at 0";
  return first < 0 ? "step (up to 0: warm-up)" : "step";
}

// The axes that every run has values for.
function axesOf(data) {
  return Object.keys(AXES).filter((axis) => axis === "steps" || data.runs.every((run) => run.curves.ends[axis]));
}

// Where each point of a series ends on the axis.
function endsOn(axis, series) {
  return axis === "steps" ? series.last : series.ends[axis];
}

// Where each point of a series is drawn on the axis.
function positionsOn(axis, series) {
  return axis === "steps" ? series.last.map((last, i) => (series.first[i] + last) / 2) : series.ends[axis];
}

// The first and last position of a series. Warm-up steps count only if it has values there.
function extentOn(axis, series) {
  if (axis !== "steps") return [0, series.ends[axis].at(-1)];
  const early = (i) => series.last[i] < 1,
    known = series.mean.map((_, i) => i).filter((i) => series.mean[i] !== null);
  const from = known.length && early(known[0]) ? known[0] : series.last.findIndex((last) => last > 0);
  const to = known.length && known.every(early) ? known.at(-1) : series.last.length - 1;
  return [series.first[Math.max(0, from)], series.last[to]];
}

function axisChoice(data, view) {
  const axes = axesOf(data);
  if (axes.length < 2) return null;
  const choice = el("select", { "aria-label": "x axis", change: () => view.setAxis(choice.value) });
  axes.forEach((axis) => choice.append(el("option", { value: axis }, AXES[axis].title)));
  return el("label", {}, "x axis ", choice);
}
