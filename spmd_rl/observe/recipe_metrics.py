"""Metrics of DPO, reward models, distillation, rejection sampling and pre-training."""

from __future__ import annotations

from spmd_rl.observe.metric import Metric

RECIPE_METRICS = (
    Metric("eval/loss", "nats", "Loss in evaluation", "mean loss of a token, over the sets"),
    Metric(
        "eval/token_accuracy",
        "",
        "Token accuracy in evaluation",
        "share of tokens that the model finds likeliest, over the sets",
    ),
    Metric(
        "eval/accuracy",
        "",
        "Accuracy in evaluation",
        "share of held-out pairs ranked as labelled, over the sets",
    ),
    Metric(
        "eval/margin",
        "",
        "Margin in evaluation",
        "mean reward of chosen minus rejected answers, over the sets",
    ),
    Metric("dpo/accuracy", "", "DPO accuracy", "share of pairs whose chosen answer gained more"),
    Metric("dpo/margin", "", "DPO margin", "mean implicit reward of chosen minus rejected answers"),
    Metric(
        "dpo/chosen_reward",
        "",
        "DPO reward of chosen answers",
        "mean of beta * (log-prob of the policy - of the reference) of chosen answers",
    ),
    Metric(
        "dpo/rejected_reward",
        "",
        "DPO reward of rejected answers",
        "mean of beta * (log-prob of the policy - of the reference) of rejected answers",
    ),
    Metric(
        "dpo/chosen_logprob",
        "nats",
        "Log-prob of chosen answers",
        "mean log-prob of a whole chosen answer",
    ),
    Metric(
        "dpo/rejected_logprob",
        "nats",
        "Log-prob of rejected answers",
        "mean log-prob of a whole rejected answer",
    ),
    Metric(
        "reward_model/accuracy",
        "",
        "Reward model accuracy",
        "share of pairs whose chosen answer has the higher reward",
    ),
    Metric(
        "reward_model/margin",
        "",
        "Reward model margin",
        "mean reward of chosen minus rejected answers",
    ),
    Metric("reward_model/chosen", "", "Reward of chosen answers", "mean reward of chosen answers"),
    Metric(
        "reward_model/rejected", "", "Reward of rejected answers", "mean reward of rejected answers"
    ),
    Metric(
        "distill/kl",
        "nats",
        "KL to the teacher",
        "estimate of KL(student || teacher) per token, from the tokens drawn",
    ),
    Metric(
        "distill/teacher_logprob",
        "nats",
        "Teacher's log-prob",
        "mean log-prob of the student's tokens under the teacher",
    ),
    Metric(
        "distill/topk_kl",
        "nats",
        "KL over the teacher's candidates",
        "mean KL divergence over the teacher's likeliest tokens and the rest as one",
    ),
    Metric(
        "rejection/kept_samples", "samples", "Accepted samples", "answers written so far in the run"
    ),
    Metric(
        "rejection/duplicates",
        "samples",
        "Repeated answers",
        "accepted answers left out because the file has them, so far in the run",
    ),
    Metric(
        "rejection/solved",
        "",
        "Prompts with an accepted sample",
        "share of the step's prompts with an accepted sample",
    ),
    Metric(
        "data/dropped",
        "records",
        "Records left out",
        "records of the data that were left out so far, as too long or as pairs of equal answers",
    ),
    Metric("data/epoch", "", "Epochs", "how often the documents were drawn so far"),
    Metric(
        "data/learned_tokens", "tokens", "Learned tokens", "tokens of the step that were learned"
    ),
)
