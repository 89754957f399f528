"""Names of all metrics, with their units and meanings."""

from __future__ import annotations

from spmd_rl.observe.age_metrics import AGE_METRICS
from spmd_rl.observe.engine_metrics import ENGINE_METRICS
from spmd_rl.observe.expert_metrics import EXPERT_METRICS
from spmd_rl.observe.metric import Metric
from spmd_rl.observe.recipe_metrics import RECIPE_METRICS

# Seven kinds of names are not listed. reward/NAME is the mean of the values that a reward function
# returns as NAME, and hook/NAME of those that hooks emit as NAME. source/NAME/share is the share of
# one source of a mixture in the step; /reward and /response_tokens_mean are means of its samples,
# /loss of its learned tokens, /accuracy and /margin of its preference pairs. before/all and
# before/NAME, in the line of step 1, are the seconds from the start of the run to step 1, in all
# and in the phase NAME. failed/KIND counts episodes that an EpisodeFailure ended, and
# rollout/rejected_REASON groups that a sampler rejected. eval/SET/SCORE is a score of one set.
METRICS = (
    Metric("reward/mean", "", "Reward", "mean reward of the step's samples"),
    Metric(
        "reward/mean_error",
        "",
        "Standard error of the reward",
        "standard error of the step's mean reward, over its prompts",
    ),
    Metric("reward/std", "", "Spread of rewards", "standard deviation of the step's rewards"),
    Metric(
        "reward/solve_none",
        "",
        "Prompts without a reward above 0",
        "share of prompts with no reward above 0",
    ),
    Metric(
        "reward/solve_all",
        "",
        "Prompts with rewards of 1 only",
        "share of prompts whose rewards are all 1 or more",
    ),
    Metric(
        "reward/failed_samples",
        "samples",
        "Failed samples",
        "samples that failed, from which nothing is learned",
    ),
    Metric(
        "reward/failed_groups",
        "prompts",
        "Failed prompts",
        "prompts left out, of which samples failed",
    ),
    Metric(
        "eval/reward",
        "",
        "Reward in evaluation",
        "mean reward of the evaluation sets, each of which weighs alike",
    ),
    Metric(
        "eval/pass@1",
        "",
        "Correct samples in evaluation",
        "mean share of correct samples of the evaluation sets, each of which weighs alike",
    ),
    Metric(
        "rollout/tokens_per_s",
        "tokens/s",
        "Rollout speed",
        "generated tokens per second of rollout, or of the whole step if rollout overlaps training",
    ),
    Metric("rollout/response_tokens_mean", "tokens", "Response length", "mean response length"),
    Metric("rollout/truncated", "", "Truncated responses", "share of responses cut at max_tokens"),
    Metric(
        "rollout/running",
        "groups",
        "Groups in generation",
        "groups that were still in generation when the step had taken its own",
    ),
    *ENGINE_METRICS,
    Metric(
        "rollout/buffered",
        "groups",
        "Buffered groups",
        "accepted groups that were left for later steps when the step had taken its own",
    ),
    Metric(
        "rollout/rejected",
        "groups",
        "Rejected groups",
        "groups of this step that were rejected, and replaced",
    ),
    Metric(
        "rollout/carried",
        "groups",
        "Carried groups",
        "unfinished groups that go on in the next step",
    ),
    Metric(
        "rollout/surplus",
        "groups",
        "Surplus groups",
        "groups that were too many or too old, whose prompts went back to the data",
    ),
    Metric(
        "rollout/missing",
        "groups",
        "Missing groups",
        "groups that a step lacks, because too many were rejected (sampler.when_short = train)",
    ),
    Metric(
        "onpolicy/mismatched_tokens",
        "tokens",
        "Mismatched tokens",
        "tokens whose trainer and engine log-probs differ in any bit",
    ),
    Metric(
        "onpolicy/compared_tokens",
        "tokens",
        "Compared tokens",
        "tokens whose log-probs were compared",
    ),
    Metric(
        "onpolicy/drawn_tokens",
        "tokens",
        "Tokens of the engine",
        "tokens in training that an engine drew",
    ),
    Metric(
        "onpolicy/compared_share",
        "share",
        "Share of tokens compared",
        "share of the engine's tokens that the trainer's version drew, which are compared",
    ),
    Metric("onpolicy/router_flips", "tokens", "Router flips", "of other experts in the engine"),
    Metric(
        "onpolicy/max_abs_dlogp",
        "nats",
        "Largest log-prob difference",
        "largest |trainer - engine| log-prob of a token",
    ),
    Metric(
        "onpolicy/mean_abs_dlogp",
        "nats",
        "Mean log-prob difference",
        "mean |trainer - engine| log-prob of a token",
    ),
    Metric(
        "onpolicy/k1",
        "nats",
        "KL divergence, k1 estimate",
        "k1 estimate of KL(engine || trainer) per token; its exp is the ratio of perplexities",
    ),
    Metric(
        "onpolicy/k3",
        "nats",
        "KL divergence, k3 estimate",
        "k3 estimate of KL(engine || trainer) per token",
    ),
    Metric(
        "onpolicy/chi2",
        "",
        "Chi-square divergence",
        "mean square of a token's ratio trainer / engine, minus 1",
    ),
    Metric(
        "onpolicy/ess",
        "",
        "Effective sample size",
        "effective sample size under these ratios, as a share of the tokens",
    ),
    Metric("train/loss", "", "Loss", "loss of the step, over its global denominator"),
    Metric("train/grad_norm", "", "Gradient norm", "norm of the whole gradient before clipping"),
    Metric("train/entropy", "nats", "Entropy", "mean entropy of the policy per response token"),
    Metric("train/clip_frac", "", "Clip fraction", "share of tokens whose ratio was clipped"),
    Metric(
        "train/ppo_kl",
        "nats",
        "KL divergence from the behaviour",
        "mean log-prob that a token lost since the samples were drawn",
    ),
    Metric(
        "train/kl",
        "nats",
        "KL divergence from the reference",
        "estimate per token: kl.estimator's in the loss, k1 in the reward",
    ),
    Metric(
        "train/correction_weight",
        "",
        "Correction weight",
        "mean weight of a token's policy loss, from the ratio trainer / engine",
    ),
    Metric(
        "train/rejected_frac",
        "",
        "Rejected tokens",
        "share of tokens that left the loss by their ratio trainer / engine",
    ),
    Metric(
        "train/kept_groups",
        "",
        "Prompts learned from",
        "share of prompts that were not left out, as dapo does where rewards are equal",
    ),
    Metric(
        "train/opsm_frac",
        "",
        "Tokens masked off-policy",
        "share of tokens whose policy loss was masked because the policy has left their sequence",
    ),
    Metric("train/lr", "", "Learning rate", "learning rate of the step"),
    Metric("critic/loss", "", "Critic's loss", "loss of the critic, over its denominator"),
    Metric("critic/grad_norm", "", "Critic's gradient norm", "norm before clipping"),
    Metric("critic/lr", "", "Critic's learning rate", "learning rate of the critic's step"),
    Metric("critic/value", "", "Mean value", "mean value that the critic gives to a token"),
    Metric("critic/clip_frac", "", "Clipped values", "share of values whose change was clipped"),
    Metric(
        "critic/explained_variance",
        "",
        "Explained variance",
        "1 - variance of (return - value) / variance of the returns, before the critic's step",
    ),
    Metric(
        "train/tokens", "tokens", "Trained tokens", "tokens of the step's batch, prompts included"
    ),
    Metric("warmup/loss", "", "Warm-up loss", "loss of a warm-up step"),
    Metric("time/warmup", "s", "Time per warm-up step", "whole warm-up step"),
    Metric("time/step", "s", "Time per step", "whole step"),
    Metric(
        "time/rollout",
        "s",
        "Rollout time",
        "generating and grading; only the wait for it if rollout overlaps training",
    ),
    Metric(
        "time/reward",
        "s",
        "Reward function time",
        "time in the reward function during rollout, on the slowest engine rank",
    ),
    Metric(
        "time/agent_mean",
        "s",
        "Agent time",
        "mean time of a request's agents before their first turn is asked for and after their last",
    ),
    Metric("time/queue_mean", "s", "Queue time", "mean wait of a request for the engine"),
    Metric(
        "time/prefill_mean",
        "s",
        "Prefill time",
        "mean time of a request from its first work in the engine to its first token",
    ),
    Metric(
        "time/decode_mean",
        "s",
        "Decode time",
        "mean time of a request from its first token to its last, tools of an episode included",
    ),
    Metric(
        "time/grading_mean",
        "s",
        "Grading time",
        "mean time of a request from its last token to its reward",
    ),
    Metric(
        "time/request_max",
        "s",
        "Longest request",
        "longest time of a request from its submission to its reward",
    ),
    Metric("time/eval", "s", "Evaluation time", "evaluating the weights that the step began with"),
    Metric("time/grade", "s", "Grading time", "grading the samples of an evaluation with a model"),
    Metric("time/train", "s", "Training time", "forward, backward and optimizer"),
    Metric("time/sync", "s", "Weight sync time", "copying weights from trainer to engine"),
    Metric(
        "sync/verified_tensors",
        "tensors",
        "Verified tensors",
        "tensors on all engine ranks that a push compared, and that hold the trainer's bits",
    ),
    Metric(
        "sync/shared_tensors",
        "tensors",
        "Shared tensors",
        "tensors on all engine ranks that are the trainer's own memory",
    ),
    Metric("sync/tensors", "tensors", "Pushed tensors", "tensors on all engine ranks"),
    Metric(
        "time/verify",
        "s",
        "Time to verify a push",
        "comparing the weights of trainer and engine, on the slowest rank; a part of time/sync",
    ),
    Metric("time/sleep", "s", "Sleep time", "giving device memory back, with copies to the host"),
    Metric("time/wake", "s", "Wake time", "taking device memory again, with copies from the host"),
    Metric(
        "time/save",
        "s",
        "Checkpoint time",
        "copying a checkpoint; it is written while the next steps run",
    ),
    Metric(
        "perf/train_tokens_per_s",
        "tokens/s",
        "Training speed",
        "trained tokens per second of training",
    ),
    Metric(
        "perf/mfu",
        "",
        "Model FLOPs utilisation",
        "model FLOPs per second over the device's dense peak",
    ),
    Metric(
        "perf/controller_share",
        "",
        "Controller's share of the step",
        "share of the step in which no worker had work",
    ),
    Metric(
        "memory/gpu_peak_gib",
        "GiB",
        "Peak device memory",
        "device memory in use after training, by all processes; highest rank",
    ),
    Metric(
        "memory/slept_gib",
        "GiB",
        "Memory given back",
        "memory that roles gave back when they went to sleep, added up; highest rank of each role",
    ),
    Metric(
        "memory/copied_gib",
        "GiB",
        "Memory copied for sleep",
        "bytes copied to host memory and back for sleep, added up; highest rank of each role",
    ),
    Metric(
        "memory/restore_s",
        "s",
        "Wait for restored memory",
        "wait of a train step for bytes that were still on their way from host memory",
    ),
    *AGE_METRICS,
    *RECIPE_METRICS,
    *EXPERT_METRICS,
)

METRIC_OF_NAME = {metric.name: metric for metric in METRICS}
