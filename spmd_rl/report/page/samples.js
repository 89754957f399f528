// The samples of one prompt side by side. A token is the darker the less likely it was.

const DARKEST = 5; // nats: log-probs of -5 and below have the full colour

function rewardColour(reward, low, high) {
  if (reward === null || reward === undefined) return "var(--soft)";
  const share = high > low ? (reward - low) / (high - low) : reward > 0 ? 1 : 0;
  return `color-mix(in oklab, var(--good) ${Math.round(100 * share)}%, var(--bad))`;
}

function tokenNode(sample, i) {
  const piece = sample.pieces[i],
    logprob = sample.logprobs[i] ?? null;
  const strength = logprob === null ? 0 : Math.min(1, -logprob / DARKEST) * 70;
  const version = sample.versions.length > 1 ? sample.versions[i] : sample.versions[0];
  const isObserved = version < 0;
  const details = [
    `token ${sample.tokens[i]}`,
    logprob === null ? null : `log-prob ${number(logprob)}`,
    logprob === null ? null : `p ${(100 * Math.exp(logprob)).toPrecision(3)} %`,
    version === undefined ? null : isObserved ? "not drawn: part of an observation" : `weights version ${version}`,
  ];
  const special = sample.known && /^<[|/]?[\w|]+[|]?>$/.test(piece);
  return el(
    "span",
    {
      class: `t${special ? " special" : ""}${isObserved ? " observed" : ""}`,
      "data-about": details.filter(Boolean).join("\n"),
      paint: { background: strength > 1 ? `color-mix(in srgb, var(--heat) ${strength.toFixed(0)}%, transparent)` : "" },
    },
    piece.split("\n").flatMap((line, j) => (j ? [el("i", { class: "nl" }), `\n${line}`] : line)),
  );
}

// The label before the first token of a turn of an episode.
function turnNode(turn, i) {
  const reward = turn.reward === null ? "" : ` · reward ${number(turn.reward)}`;
  return el("span", { class: "turn" }, `turn ${i + 1}${reward}`);
}

function tokenNodes(sample) {
  if (!sample.tokens.length) return [sample.pieces.join("")];
  const end = sample.left_out_at ?? sample.pieces.length, // what follows is not where it was
    turns = sample.turns.length > 1 ? sample.turns.filter((turn) => turn.first < end) : [];
  const nodes = sample.pieces.map((_, i) => tokenNode(sample, i));
  return nodes.flatMap((node, i) => [...turns.flatMap((turn, j) => (turn.first === i ? turnNode(turn, j) : [])), node]);
}

function answerNode(sample, low, high) {
  const meanLogprob = mean(sample.logprobs.filter((v) => v !== null));
  const tokens = tokenNodes(sample);
  if (sample.left_out_at !== undefined)
    tokens.splice(
      tokens.length - (sample.pieces.length - sample.left_out_at),
      0,
      el("span", { class: "gap" }, `… ${number(sample.num_tokens - sample.pieces.length)} tokens left out …`),
    );
  const parts = Object.entries(sample.parts).filter(([name]) => name !== "reward");
  const drawnBy = sample.versions.filter((version) => version >= 0),
    versions = drawnBy.length ? span(drawnBy) : [];
  return el(
    "article",
    { class: "card answer", "data-index": sample.index },
    el(
      "header",
      {},
      el(
        "span",
        { class: "badge reward", "--tone": rewardColour(sample.reward, low, high) },
        `reward ${number(sample.reward)}`,
      ),
      el(
        "span",
        { class: "badge status", "--tone": sample.status === "completed" ? "var(--soft)" : "var(--c1)" },
        sample.status,
      ),
      el(
        "span",
        { class: "more", title: versions.length ? `drawn by weights version ${[...new Set(versions)].join(" to ")}` : "" },
        [
          `#${sample.index}`,
          sample.execution < 0 ? null : `episode ${sample.execution}`,
          sample.agent,
          `${number(sample.num_tokens)} tokens`,
          meanLogprob === null ? null : `mean log-prob ${number(Number(meanLogprob.toFixed(3)))}`,
        ]
          .filter(Boolean)
          .join(" · "),
      ),
    ),
    sample.context
      ? el(
          "details",
          { class: "context" },
          el("summary", {}, "begins with a context of its own"),
          el("div", { class: "text observed", dir: "auto" }, sample.context),
        )
      : null,
    el("div", { class: "text", dir: "auto" }, tokens),
    sample.error ? el("div", { class: "parts" }, sample.error) : null,
    parts.length
      ? el(
          "div",
          { class: "parts" },
          parts.map(([name, value]) => `${name} ${typeof value === "number" ? number(value) : value}`).join(" · "),
        )
      : null,
    ...Object.entries(sample.notes).map(([name, text]) => el("div", { class: "parts note" }, `${name}: ${text}`)),
  );
}

// What one has said in a conversation: who, whether it is learned, by which weights, and the words.
function speechNode(speech) {
  const { num_tokens: all, num_learned: learned, versions } = speech;
  const isDrawn = versions.length > 0;
  const part = learned === all ? "learned" : learned ? `${number(learned)} learned` : isDrawn ? "drawn, not learned" : "not learned";
  const facts = [
    speech.agent,
    `${count(all, "token")}, ${part}`,
    isDrawn ? `version ${[...new Set(versions)].join(" to ")}` : null,
    speech.reward === null ? null : `reward ${number(speech.reward)}`,
  ];
  return el(
    "li",
    { class: `speech${learned ? " learned" : ""}` },
    el(
      "div",
      { class: "who" },
      el("span", { class: "badge", "--tone": learned ? "var(--good)" : "var(--soft)" }, speech.role),
      " ",
      el("span", { class: "more" }, facts.filter(Boolean).join(" · ")),
    ),
    el("div", { class: "text", dir: "auto" }, speech.text),
  );
}

function treeNode(tree) {
  return el(
    "ul",
    { class: "talk" },
    tree.speeches.filter((speech) => speech.role !== "prompt").map(speechNode),
    tree.branches.map((branch, i) =>
      el(
        "li",
        { class: "branch" },
        el("div", { class: "label" }, `branch ${i + 1} of ${tree.branches.length}: ${numbered(branch.samples)}`),
        treeNode(branch),
      ),
    ),
  );
}

function numbered(samples) {
  return `${samples.length > 1 ? "samples" : "sample"} ${samples.map((index) => `#${index}`).join(", ")}`;
}

// The conversations of a prompt's episodes, of which the first is open.
function conversationNodes(group) {
  return (group.conversations || []).map(({ name, tree }, i) =>
    el(
      "details",
      { class: "card conversation", ...(i ? {} : { open: "" }) },
      el("summary", {}, `conversation of ${name}: ${numbered(tree.samples)}`),
      treeNode(tree),
    ),
  );
}

const ORDERS = [
  ["index", "as drawn"],
  ["reward", "by reward"],
  ["num_tokens", "by length"],
];

function samplesSection(data) {
  const runs = data.runs.map((run, i) => [i, run.name]).filter(([i]) => data.runs[i].samples.steps.length);
  if (!runs.length) return { node: section("samples", "Samples", "", [], empty("The run folder holds no samples.")) };
  const note = el("span"),
    tools = el("span"),
    body = el("div"),
    state = { run: runs[0][0], step: null, group: 0, order: "index" };
  const tip = el("div", { class: "tip", hidden: "" });
  body.addEventListener("pointermove", (event) => {
    const about = event.target.dataset && event.target.dataset.about;
    tip.hidden = !about;
    if (!about) return;
    tip.textContent = about;
    tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - 170)}px`;
    tip.style.top = `${event.clientY + 16}px`;
  });
  body.addEventListener("pointerleave", () => {
    tip.hidden = true;
  });

  function show(change) {
    Object.assign(state, change);
    const { steps, num_steps: all } = data.runs[state.run].samples,
      chosen = state.step === null ? steps.at(-1) : nearest(steps, state.step);
    state.step = chosen.step;
    state.group = Math.min(state.group, chosen.groups.length - 1);
    tools.replaceChildren(
      ...[
        runs.length > 1 ? picker("run", runs, state.run, (run) => show({ run })) : null,
        picker(
          "step",
          steps.map((s) => [s.step, `${s.step}`]),
          state.step,
          (value) => show({ step: value }),
        ),
        picker(
          "prompt",
          chosen.groups.map((g, i) => [i, `${i + 1}: ${g.name || g.uid}`]),
          state.group,
          (group) => show({ group }),
        ),
        picker("order", ORDERS, state.order, (order) => show({ order })),
      ]
        .filter(Boolean)
        .flatMap((node) => [node, " "]),
    );
    note.textContent = leftOutNote(chosen, steps.length, all);
    body.replaceChildren(
      overview(chosen.groups, state.group, (group) => show({ group })),
      ...groupNodes(chosen.groups[state.group], state.order),
    );
  }
  return {
    node: section("samples", "Samples", note, [tools], body, tip),
    start: () => show({}),
    go: (step) => show({ step }),
  };
}

function leftOutNote(step, shown, all) {
  const numHere = step.groups.reduce((sum, group) => sum + group.samples.length, 0);
  const few = [
    numHere < step.num_samples ? `${numHere} of the step's ${number(step.num_samples)} samples` : "",
    shown < all ? `${shown} of ${number(all)} steps` : "",
  ].filter(Boolean);
  return few.length ? `shown: ${few.join(", ")}; the run folder has all in samples/` : "";
}

// A button for every prompt of the step, with a square in the colour of its reward for each sample.
function overview(groups, chosen, onPick) {
  const [low, high] = span([0, 1, ...groups.flatMap(rewardsOf)]);
  return el(
    "div",
    { class: "overview" },
    groups.map((group, i) =>
      el(
        "button",
        {
          "aria-pressed": String(i === chosen),
          "aria-label": `prompt ${i + 1}`,
          title: group.name,
          click: () => onPick(i),
        },
        group.samples.map((sample) => el("i", { "--tone": rewardColour(sample.reward, low, high) })),
      ),
    ),
  );
}

function rewardsOf(group) {
  return group.samples.map((sample) => sample.reward).filter((reward) => typeof reward === "number");
}

function groupNodes(group, order) {
  const rewards = rewardsOf(group),
    [low, high] = span([0, 1, ...rewards]);
  const episode = (sample) => (sample.execution < 0 ? sample.index : sample.execution);
  const sorted = [...group.samples].sort((a, b) =>
    order === "reward"
      ? (b.reward ?? -Infinity) - (a.reward ?? -Infinity)
      : order === "index"
        ? episode(a) - episode(b) || a.index - b.index
        : a[order] - b[order],
  );
  const boundariesGuessed = group.samples.some((s) => s.tokens.length && !s.known);
  return [
    el(
      "div",
      { class: "card ask" },
      el("div", {}, el("div", { class: "label" }, "prompt"), el("div", { class: "text", dir: "auto" }, group.prompt)),
      el(
        "div",
        {},
        el("div", { class: "label" }, "reference answer"),
        el("div", { class: "text", dir: "auto" }, group.answer || "–"),
        el("div", { class: "label" }, `mean reward ${number(mean(rewards))} over ${count(rewards.length, "sample")}`),
      ),
      el(
        "div",
        { class: "label" },
        "token colours: certain ",
        el("span", { class: "scale" }),
        ` log-prob ≤ −${DARKEST}`,
        boundariesGuessed
          ? " · without a tokenizer, texts are cut evenly, so a colour may be off its token"
          : "",
      ),
    ),
    el(
      "div",
      { class: "answers" },
      sorted.map((sample) => answerNode(sample, low, high)),
    ),
    ...conversationNodes(group),
  ];
}
