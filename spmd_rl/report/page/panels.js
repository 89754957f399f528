// Charts and the metrics they show. Colours come with the data, so that curves.png has the same.

const PHASES = ["rollout", "train", "sync", "sleep", "wake", "eval"];
const PART = "reward/"; // prefix of the parts of a reward
const EVALUATION = /^eval\/(?:(.+)\/)?([^/]+)$/; // eval/SET/SCORE, or eval/SCORE of all sets
const NOT_DRAWN = new Set(["pass@1"]); // the first is avg@n under another name
const EVALUATIONS = "Evaluation: all sets";
const SCORES_IN_WORDS = {
  reward: "mean reward",
  loss: "loss of a token in nats",
  token_accuracy: "share of tokens found likeliest",
  accuracy: "share of pairs ranked as labelled",
  margin: "reward of chosen minus rejected answers",
  truncated: "truncated responses",
  response_tokens_mean: "response length in tokens",
  failed_samples: "failed samples",
};

// A line is [metric, label], or [metric, label, "dashed"].
const PANELS = [
  {
    title: "Reward",
    share: true,
    lines: [
      ["reward/mean", "mean"],
      ["reward/solve_all", "all ≥ 1", "dashed"],
      ["reward/solve_none", "none > 0", "dashed"],
    ],
  },
  {
    title: EVALUATIONS,
    lines: [
      ["eval/reward", "mean reward"],
      ["eval/pass@1", "share of correct samples", "dashed"],
      ["eval/loss", "loss"],
      ["eval/token_accuracy", "share of tokens found likeliest", "dashed"],
      ["eval/margin", "margin of pairs"],
      ["eval/accuracy", "share of pairs ranked as labelled", "dashed"],
    ],
  },
  { title: "Spread of rewards", floor: 0, lines: [["reward/std", "standard deviation"]] },
  { title: "Response length", unit: "tokens", floor: 0, lines: [["rollout/response_tokens_mean", "mean"]] },
  { title: "Truncated responses", floor: 0, share: true, lines: [["rollout/truncated", "share"]] },
  {
    title: "Groups of the sampler",
    floor: 0,
    lines: [
      ["rollout/running", "in generation"],
      ["rollout/buffered", "buffered"],
      ["rollout/rejected", "rejected"],
      ["rollout/surplus", "surplus"],
    ],
  },
  { title: "Samples that wait for an engine", floor: 0, lines: [["rollout/waiting", "waiting"]] },
  { title: "Entropy", unit: "nats", floor: 0, lines: [["train/entropy", "per token"]] },
  { title: "Clip fraction", floor: 0, lines: [["train/clip_frac", "of tokens"]] },
  {
    title: "KL divergences of the policy",
    unit: "nats",
    lines: [
      ["train/kl", "from the reference"],
      ["train/ppo_kl", "from the behaviour"],
    ],
  },
  { title: "Correction weight", floor: 0, lines: [["train/correction_weight", "trainer / engine"]] },
  {
    title: "Tokens left out of the loss",
    floor: 0,
    lines: [
      ["train/rejected_frac", "rejected"],
      ["train/opsm_frac", "masked off-policy"],
    ],
  },
  { title: "Prompts learned from", share: true, floor: 0, lines: [["train/kept_groups", "share"]] },
  { title: "Critic's loss", floor: 0, lines: [["critic/loss", "loss"]] },
  {
    title: "Critic's values",
    lines: [
      ["critic/value", "mean"],
      ["critic/explained_variance", "explained variance"],
      ["critic/clip_frac", "clipped share"],
    ],
  },
  { title: "Critic's gradient norm", floor: 0, lines: [["critic/grad_norm", "before clipping"]] },
  { title: "Critic's learning rate", floor: 0, lines: [["critic/lr", "rate"]] },
  {
    title: "Samples and prompts left out",
    floor: 0,
    lines: [
      ["reward/failed_samples", "samples"],
      ["reward/failed_groups", "prompts"],
    ],
  },
  {
    title: "Mismatched tokens",
    unit: "trainer vs engine",
    floor: 0,
    whole: true,
    lines: [["onpolicy/mismatched_tokens", "tokens a step"]],
  },
  {
    title: "Share of tokens compared",
    unit: "share",
    floor: 0,
    lines: [["onpolicy/compared_share", "of the engine's tokens"]],
  },
  {
    title: "Trainer vs engine",
    unit: "nats",
    floor: 0,
    whole: true,
    lines: [
      ["onpolicy/max_abs_dlogp", "max |Δ log-prob|"],
      ["onpolicy/mean_abs_dlogp", "mean |Δ log-prob|"],
      ["onpolicy/k1", "KL, k1"],
      ["onpolicy/k3", "KL, k3"],
    ],
  },
  {
    title: "Trainer / engine ratios",
    share: true,
    floor: 0,
    lines: [
      ["onpolicy/ess", "effective sample size"],
      ["onpolicy/chi2", "chi-square"],
    ],
  },
  {
    title: "Pairs ranked as labelled",
    share: true,
    lines: [
      ["dpo/accuracy", "DPO"],
      ["reward_model/accuracy", "reward model"],
    ],
  },
  {
    title: "Rewards of pairs",
    lines: [
      ["dpo/margin", "margin"],
      ["dpo/chosen_reward", "chosen"],
      ["dpo/rejected_reward", "rejected"],
      ["reward_model/margin", "margin"],
      ["reward_model/chosen", "chosen"],
      ["reward_model/rejected", "rejected"],
    ],
  },
  {
    title: "Log-probs of answers",
    unit: "nats",
    lines: [
      ["dpo/chosen_logprob", "chosen"],
      ["dpo/rejected_logprob", "rejected"],
    ],
  },
  {
    title: "Student and teacher",
    unit: "nats",
    lines: [
      ["distill/kl", "KL, from samples"],
      ["distill/topk_kl", "KL, of candidates"],
      ["distill/teacher_logprob", "teacher's log-prob"],
    ],
  },
  {
    title: "Accepted samples",
    floor: 0,
    lines: [
      ["rejection/kept_samples", "written"],
      ["rejection/duplicates", "repeated"],
    ],
  },
  { title: "Prompts solved", share: true, floor: 0, lines: [["rejection/solved", "share"]] },
  { title: "Learned tokens", floor: 0, lines: [["data/learned_tokens", "tokens a step"]] },
  { title: "Epochs", floor: 0, lines: [["data/epoch", "passes over the data"]] },
  { title: "Warm-up loss", lines: [["warmup/loss", "loss"]] },
  { title: "Loss", lines: [["train/loss", "loss"]] },
  { title: "Gradient norm", floor: 0, lines: [["train/grad_norm", "before clipping"]] },
  { title: "Learning rate", floor: 0, lines: [["train/lr", "rate"]] },
  {
    title: "Sample age",
    unit: "weight versions",
    floor: 0,
    lines: [
      ["version/lag_mean", "mean"],
      ["version/lag_max", "oldest token"],
    ],
  },
  {
    title: "Time per step",
    unit: "s",
    floor: 0,
    stacked: true,
    lines: [...PHASES, "other"].map((phase) => [`time/${phase}`, phase]),
  },
  {
    title: "Speed",
    unit: "tokens/s",
    floor: 0,
    lines: [
      ["rollout/tokens_per_s", "rollout"],
      ["perf/train_tokens_per_s", "train"],
    ],
  },
  {
    title: "Tokens per step",
    unit: "tokens",
    floor: 0,
    lines: [
      ["train/tokens", "trained"],
      ["onpolicy/drawn_tokens", "of the engine"],
      ["onpolicy/compared_tokens", "compared"],
    ],
  },
  { title: "Time per warm-up step", unit: "s", floor: 0, lines: [["time/warmup", "whole step"]] },
  {
    title: "Time of a request",
    unit: "s",
    floor: 0,
    lines: [
      ["time/queue_mean", "queue"],
      ["time/prefill_mean", "prefill"],
      ["time/decode_mean", "decode"],
      ["time/grading_mean", "grading"],
      ["time/request_max", "longest, in all", "dashed"],
    ],
  },
  { title: "Reward function time", unit: "s", floor: 0, lines: [["time/reward", "all processes"]] },
  { title: "Time to verify weights", unit: "s", floor: 0, lines: [["time/verify", "slowest rank"]] },
  {
    title: "Weights of the engine",
    unit: "tensors",
    floor: 0,
    lines: [
      ["sync/tensors", "pushed"],
      ["sync/verified_tensors", "equal to the trainer's"],
      ["sync/shared_tensors", "the trainer's memory"],
    ],
  },
  { title: "Grading time", unit: "s", floor: 0, lines: [["time/grade", "with a model"]] },
  { title: "Checkpoint time", unit: "s", floor: 0, lines: [["time/save", "copy, while steps wait"]] },
  {
    title: "Utilisation",
    floor: 0,
    lines: [
      ["perf/mfu", "MFU"],
      ["perf/controller_share", "controller's share"],
    ],
  },
  { title: "Device memory", unit: "GiB", floor: 0, lines: [["memory/gpu_peak_gib", "peak"]] },
  {
    title: "Memory of roles that sleep, of a step",
    unit: "GiB",
    floor: 0,
    lines: [
      ["memory/slept_gib", "given back"],
      ["memory/copied_gib", "copied to the host and back", "dashed"],
    ],
  },
  { title: "Wait for restored memory", unit: "s", floor: 0, lines: [["memory/restore_s", "of a train step"]] },
];

function panelsOf(data) {
  return data.runs.length === 1 ? panelsOfOne(data, data.runs[0]) : panelsOfMany(data);
}

// Related metrics share a chart. A metric that is not in PANELS has its own.
function panelsOfOne(data, run) {
  const columns = { ...run.curves.columns, "time/other": otherTime(run.curves.columns) };
  const panels = PANELS.map((panel) => ({
    ...panel,
    series: panel.lines
      .filter(([metric]) => columns[metric])
      .map(([metric, label, style]) => ({
        ...lineOf(run, metric, columns[metric]),
        metric,
        label,
        run: 0,
        dashed: style === "dashed",
        colour: panel.stacked ? data.phase_colours[label] : data.metrics[metric].colour,
      })),
  })).filter((panel) => panel.series.length);
  const place = panels.findIndex((panel) => panel.title === EVALUATIONS) + 1;
  panels.splice(place, 0, ...evaluationPanels(data, run));
  const shown = new Set([...PANELS.flatMap((panel) => panel.lines.map(([metric]) => metric)), "time/step"]);
  const own = Object.keys(columns).filter((metric) => columns[metric] && !shown.has(metric) && !(EVALUATION.exec(metric) || [])[1]);
  return panels.concat(own.map((metric) => singleMetric(data, metric)));
}

// A chart for each score of the evaluations, with a line for each set.
function evaluationPanels(data, run) {
  const columns = run.curves.columns,
    bySet = Object.keys(columns).filter((metric) => (EVALUATION.exec(metric) || [])[1]),
    found = new Set(bySet.map((metric) => EVALUATION.exec(metric)[2])),
    scores = ["reward", ...found].filter((score, i, all) => found.has(score) && all.indexOf(score) === i && !NOT_DRAWN.has(score) && !score.endsWith("_error"));
  return scores.map((score) => ({
    title: `Evaluation: ${SCORES_IN_WORDS[score] || score}`,
    meaning: `eval/SET/${score}, of the weights after so many steps`,
    floor: 0,
    series: bySet
      .filter((metric) => EVALUATION.exec(metric)[2] === score)
      .map((metric, i) => ({
        ...lineOf(run, metric, columns[metric]),
        metric,
        label: EVALUATION.exec(metric)[1],
        run: 0,
        colour: data.part_colours[i % data.part_colours.length],
      })),
  }));
}

// The values and points of a metric. Those of evaluations are far apart, and yet a line.
function lineOf(run, metric, values) {
  const line = { ...values, ...pointsOf(run) };
  return values && EVALUATION.test(metric) ? withoutGaps(line) : line;
}

// The points that have a value, so that a line connects them.
function withoutGaps(line) {
  const known = (values) => values && values.filter((_, i) => line.mean[i] !== null);
  const ends = Object.fromEntries(Object.entries(line.ends).map(([axis, values]) => [axis, known(values)]));
  const { mean, low, high, first, last } = line;
  return { sparse: true, mean: known(mean), low: known(low), high: known(high), first: known(first), last: known(last), ends };
}

// The steps and axis positions of a run's points.
function pointsOf({ curves }) {
  return { first: curves.first, last: curves.last, ends: curves.ends };
}

// For several runs: one chart a metric, with one line a run.
function panelsOfMany(data) {
  const all = new Set(data.runs.flatMap((run) => Object.keys(run.curves.columns)));
  return [...all].map((metric) => singleMetric(data, metric));
}

function singleMetric(data, metric) {
  const known = data.metrics[metric] || {},
    like = PANELS.find((panel) => panel.lines.some(([name]) => name === metric)) || {};
  const series = data.runs.map((run, i) => ({
    ...lineOf(run, metric, run.curves.columns[metric]),
    metric,
    label: data.runs.length > 1 ? run.name : "value",
    run: i,
    colour: data.runs.length > 1 ? `--c${i}` : partColour(data, metric),
  }));
  return {
    title: titleOf(data, metric),
    unit: known.unit,
    meaning: known.meaning ? `${known.meaning} (${metric})` : metric,
    floor: metric.startsWith("time/") ? 0 : like.floor,
    share: like.share,
    whole: like.whole,
    series: series.filter((s) => s.mean),
  };
}

// Known metrics have a label. A metric that only a recipe logs is shown by its name.
function titleOf(data, metric) {
  if (data.metrics[metric]) return data.metrics[metric].label;
  return metric.startsWith(PART) ? `Reward part: ${metric.slice(PART.length)}` : metric;
}

function partColour(data, metric) {
  const parts = Object.keys(data.runs[0].curves.columns).filter((name) => name.startsWith(PART) && !data.metrics[name]);
  return data.part_colours[parts.indexOf(metric) % data.part_colours.length] || "--c0";
}

// Charts whose values are all 0 are listed in one line.
function isZero(panel) {
  return panel.series.every((s) => [s.mean, s.low || [], s.high || []].flat().every((v) => v === null || v === 0));
}

function zeroLine(panels) {
  if (!panels.length) return null;
  const titles = panels.map(({ title }) => (/^[A-Z][a-z]/.test(title) ? title[0].toLowerCase() + title.slice(1) : title));
  const start = panels.length === 1 ? "This was" : "These were";
  return el("p", { class: "sub zeros" }, `${start} 0 throughout: ${titles.join(", ")}.`);
}

// The time of a step outside all phases.
function otherTime(columns) {
  if (!columns["time/step"]) return undefined;
  const phases = PHASES.map((phase) => columns[`time/${phase}`]).filter(Boolean);
  const mean = columns["time/step"].mean.map((whole, i) =>
    whole === null ? null : Math.max(0, whole - phases.reduce((sum, p) => sum + (p.mean[i] || 0), 0)),
  );
  return { mean };
}

function curvesSection(data, view) {
  const panels = panelsOf(data);
  if (!panels.length)
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
    max: 0.98,
    step: 0.02,
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
    panels.filter((panel) => !isZero(panel)).map((panel) => new Chart(panel, view).node),
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
    zeroLine(panels.filter(isZero)),
  );
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
