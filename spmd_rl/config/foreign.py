"""Settings by the names that TRL, slime and verl have for them. docs/coming-from.md shows them all.

A row has our keys, then their names in each of the three, and what a reader must know besides.
Where a row has several keys, those count that a recipe has. A row without keys is a setting that we
do not have; its last column says what to do. verl's names stand without `actor_rollout_ref.`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import NamedTuple

PROGRAMS = ("TRL", "slime", "verl")
PREFIX = "actor_rollout_ref."  # of verl's names
TABLES = {"actor_rollout_ref", "actor", "rollout", "ref"}  # of verl's, which no recipe of ours has

TABLE = """
model | model_name_or_path | hf_checkpoint | model.path |
data | train_dataset dataset_name | prompt_data | data.train_files |
eval.data | eval_dataset | eval_prompt_data | data.val_files |
eval.every | eval_steps eval_strategy | eval_interval | trainer.test_freq |
eval.before | eval_on_start | | trainer.val_before_train |
eval.num_samples | num_generations_eval | n_samples_per_eval_prompt | rollout.val_kwargs.n |
eval.sampling | | eval_temperature eval_top_p | rollout.val_kwargs.temperature |
eval.sampling | | eval_max_response_len | rollout.val_kwargs.top_p rollout.val_kwargs.do_sample |
prompts.prompt_key | | input_key | data.prompt_key |
prompts.answer_key | | label_key | |
prompts.reward_key | | metadata_key | |
prompts.chat_template | | apply_chat_template | |
prompts.template_kwargs | chat_template_kwargs | apply_chat_template_kwargs | |
prompts.template_kwargs | | | data.apply_chat_template_kwargs |
prompts.tools_key | | tool_key | |
prompts.max_prompt_tokens | max_prompt_length | rollout_max_prompt_len | data.max_prompt_length |
prompts.max_prompt_tokens | | | data.filter_overlong_prompts |
prompts.shuffle | shuffle_dataset | rollout_shuffle | data.shuffle |
prompts.seed | data_seed | | data.seed |
run.seed | | rollout_seed | |
learn | assistant_only_loss completion_only_loss | | |
documents.text_key | dataset_text_field | | |
reward | reward_funcs | rm_type custom_rm_path | |
reward | | | custom_reward_function.path custom_reward_function.name |
graders.remote.url | | rm_url | |
reward_model | reward_model_path | | reward_model.path reward_model.model.path |
teacher | teacher_model_name_or_path | opd_teacher_load | |
steps | max_steps | num_rollout | trainer.total_training_steps |
epochs | num_train_epochs | num_epoch | trainer.total_epochs |
prompts_per_step pairs_per_step | generation_batch_size | rollout_batch_size | \
data.train_batch_size |
sampling.num_samples | num_generations | n_samples_per_prompt | rollout.n |
sampling.max_tokens | max_completion_length max_new_tokens | rollout_max_response_len | |
sampling.max_tokens | | | data.max_response_length rollout.response_length |
sampling.temperature | temperature | rollout_temperature | rollout.temperature |
sampling.top_p | top_p | rollout_top_p | rollout.top_p |
sampling.top_k | top_k | rollout_top_k | rollout.top_k |
sampling.min_p | min_p | | rollout.min_p |
sampling.stop | | rollout_stop | |
sampling.stop_ids | | rollout_stop_token_ids | |
sampling.ignore_eos | | | rollout.ignore_eos |
trainer.lr | learning_rate | lr | actor.optim.lr |
critic.lr | | critic_lr | critic.optim.lr |
trainer.schedule | lr_scheduler_type | lr_decay_style | actor.optim.lr_scheduler_type |
trainer.schedule | | | actor.optim.warmup_style |
trainer.warmup_steps | warmup_steps | lr_warmup_iters | actor.optim.lr_warmup_steps |
trainer.warmup_steps | warmup_ratio | lr_warmup_fraction | actor.optim.lr_warmup_steps_ratio | \
a number of steps, not a share of them
trainer.total_steps | | lr_decay_iters | actor.optim.total_training_steps |
trainer.optimizer.kind | optim | optimizer | actor.optim.optimizer actor.optim.optimizer_impl |
trainer.betas | adam_beta1 adam_beta2 | adam_beta1 adam_beta2 | actor.optim.betas |
trainer.eps | adam_epsilon | adam_eps | |
trainer.weight_decay | weight_decay | weight_decay | actor.optim.weight_decay |
trainer.freeze | | freeze_params_name_list | |
trainer.lora.rank | lora_r use_peft | | model.lora_rank |
trainer.lora.alpha | lora_alpha | | model.lora_alpha |
trainer.lora.targets | lora_target_modules | | model.target_modules |
trainer.lora.folder | | | model.lora_adapter_path |
trainer.lora.merged_push | | | model.lora.merge |
trainer.clip_norm | max_grad_norm | clip_grad | actor.grad_clip |
trainer.minibatches | num_iterations steps_per_generation | num_steps_per_rollout | |
trainer.minibatches | | global_batch_size | actor.ppo_mini_batch_size |
trainer.max_tokens | per_device_train_batch_size | max_tokens_per_gpu use_dynamic_batch_size | |
trainer.max_tokens | | micro_batch_size | actor.ppo_max_token_len_per_gpu actor.use_dynamic_bsz |
trainer.max_tokens | | | actor.ppo_micro_batch_size actor.ppo_micro_batch_size_per_gpu |
trainer.max_tokens | | | rollout.log_prob_micro_batch_size_per_gpu |
trainer.max_tokens | | | ref.log_prob_micro_batch_size_per_gpu |
trainer.backend.kind | | train_backend | actor.strategy |
trainer.backend.recompute | gradient_checkpointing | recompute_granularity | |
trainer.backend.recompute | gradient_checkpointing_kwargs | | |
trainer.backend.recompute | | | model.enable_gradient_checkpointing |
trainer.backend.offload | | optimizer_cpu_offload | actor.fsdp_config.optimizer_offload |
trainer.backend.offload | | | actor.fsdp_config.param_offload |
trainer.backend.offload_activations | activation_offloading | | model.enable_activation_offload |
trainer.dtype | bf16 fp16 torch_dtype | bf16 fp16 | actor.fsdp_config.model_dtype |
trainer.deterministic | full_determinism | deterministic_mode | |
trainer.save_optimizer | save_only_model | no_save_optim | |
algorithm | scale_rewards importance_sampling_level | advantage_estimator | \
algorithm.adv_estimator |
algorithm | | disable_grpo_std_normalization | algorithm.norm_adv_by_std_in_grpo |
algorithm | | | actor.policy_loss.loss_mode |
clip_low | epsilon | eps_clip | actor.clip_ratio_low actor.clip_ratio |
clip_high | epsilon_high | eps_clip_high | actor.clip_ratio_high |
dual_clip | delta | eps_clip_c | actor.clip_ratio_c |
aggregation | loss_type | calculate_per_token_loss | actor.loss_agg_mode |
entropy_coef | | | actor.entropy_coeff |
kl.coef | beta | kl_loss_coef use_kl_loss kl_coef | actor.kl_loss_coef actor.use_kl_loss |
kl.coef | | | algorithm.kl_ctrl.kl_coef |
kl.place | | | algorithm.use_kl_in_reward |
kl.estimator | | kl_loss_type | actor.kl_loss_type algorithm.kl_penalty |
kl.unbiased | use_bias_correction_kl | use_unbiased_kl | |
kl.reference reference | ref_model | ref_load | |
kl.refresh_every | sync_ref_model ref_model_sync_steps | ref_update_interval | |
correction.mode | vllm_importance_sampling_mode | use_tis | \
algorithm.rollout_correction.rollout_is |
correction.high | vllm_importance_sampling_clip_max | tis_clip | \
algorithm.rollout_correction.rollout_is_threshold |
correction.low | vllm_importance_sampling_clip_min | tis_clip_low | |
correction.mean_one | | | algorithm.rollout_correction.rollout_is_batch_normalize |
correction.reject | | custom_tis_function_path | algorithm.rollout_correction.rollout_rs |
opsm_delta | off_policy_mask_threshold | use_opsm | |
behaviour | | use_rollout_logprobs | algorithm.rollout_correction.bypass_mode |
mask_truncated | mask_truncated_completions | | |
overlong.buffer | | | reward_model.overlong_buffer |
reward_weights | | | algorithm.gdpo_reward_weights |
discount | | gamma | algorithm.gamma |
gae_lambda | | lambd | algorithm.lam |
value_clip | | | critic.cliprange_value |
critic_warmup_steps | | num_critic_only_steps | trainer.critic_warmup |
drop_equal_groups | | | algorithm.filter_groups.enable |
hooks.keep_group | | dynamic_sampling_filter_path | |
sampler.max_gen_batches | | | algorithm.filter_groups.max_num_gen_batches |
sampler.oversample | | over_sampling_batch_size | |
sampler.round_tokens | | partial_rollout | | in tokens that a sample draws at a time
hooks.generate | rollout_func | custom_generate_function_path | rollout.multi_turn.enable |
engine.kind | use_vllm vllm_mode | | rollout.name |
engine.memory_fraction | vllm_gpu_memory_utilization | sglang_mem_fraction_static | \
rollout.gpu_memory_utilization |
engine.max_batch | | sglang_max_running_requests | rollout.max_num_seqs |
engine.max_step_tokens | | | rollout.max_num_batched_tokens |
engine.prefix_cache | | | rollout.enable_prefix_caching |
engine.cuda_graphs | | sglang_disable_cuda_graph | rollout.enforce_eager |
offload.sleep | vllm_enable_sleep_mode | offload_rollout | rollout.free_cache_engine |
split.infer.tp | vllm_tensor_parallel_size | rollout_num_gpus_per_engine | \
rollout.tensor_model_parallel_size |
split.infer.ranks | | rollout_num_gpus | |
split.train.fsdp | fsdp | | actor.fsdp_config.fsdp_size |
split.train.tp | | tensor_model_parallel_size | actor.megatron.tensor_model_parallel_size |
split.train.pp | | pipeline_model_parallel_size | actor.megatron.pipeline_model_parallel_size |
split.train.cp | | context_parallel_size | actor.megatron.context_parallel_size |
split.train.cp | | | actor.ulysses_sequence_parallel_size |
split.train.ep | | expert_model_parallel_size | actor.megatron.expert_model_parallel_size |
split.train.etp | | expert_tensor_parallel_size | actor.megatron.expert_tensor_parallel_size |
--nproc | num_processes nproc_per_node | actor_num_gpus_per_node | trainer.n_gpus_per_node |
--nproc | | actor_num_nodes | trainer.nnodes | \
for one node; `spmd-rl submit RECIPE --nodes N` starts several
run.save_every | save_steps save_strategy | save_interval | trainer.save_freq |
run.keep_checkpoints | save_total_limit | | trainer.max_actor_ckpt_to_keep |
run.best | load_best_model_at_end metric_for_best_model | | |
run.patience | early_stopping_patience | | |
run.folder | output_dir logging_dir | save | trainer.default_local_dir |
run.name | run_name | | trainer.experiment_name |
run.sinks | report_to | use_wandb use_tensorboard | trainer.logger |
| resume_from_checkpoint | load | trainer.resume_mode | the same command again resumes a run
| | colocate | | trainer and engine share all ranks unless split.* says otherwise
| | debug_rollout_only | | `spmd-rl run collect` generates alone
| | debug_train_only | | `spmd-rl run replay` trains alone
| do_eval | | trainer.val_only | `spmd-rl eval` scores a model or a checkpoint
| trust_remote_code | | model.trust_remote_code | no code of a model folder is run
| | sglang_context_length | rollout.max_model_len | the context is that of the model's config.json
| repetition_penalty | | rollout.repetition_penalty | samples are drawn from the policy as it is
| top_entropy_quantile | | | every token of an answer is learned from
| logging_steps logging_strategy | | | every step is logged
| log_completions | | trainer.rollout_data_dir | samples of every step are in the run's folder
| gradient_accumulation_steps | | | micro-batches follow from trainer.max_tokens
| | | actor.ppo_epochs | every sample is learned from once (trainer.minibatches)
| per_device_eval_batch_size | | | the engine makes its own batches (engine.max_batch)
| max_length max_seq_length | | data.max_length data.truncation | records are never truncated
| packing padding_free | | model.use_remove_padding | sequences are always packed
| lora_dropout | | | adapters have no dropout
| load_in_4bit load_in_8bit | | | adapters have their base in bfloat16
| deepspeed | | | FSDP2 shards the trainer (split.train.fsdp)
| attn_implementation use_liger_kernel torch_compile | | model.use_liger \
actor.use_torch_compile | the kernels are those of the engine
| remove_unused_columns | | | a record keeps all its fields, and a reward reads them in prompt.meta
| chat_template_path | | | the template is that of the model's folder
| vllm_server_host vllm_server_port | | | engines live in the ranks of the run
| push_to_hub hub_model_id | | | `spmd-rl export`, then `hf upload`
| project | wandb_project | trainer.project_name | W&B reads WANDB_PROJECT
"""


class Row(NamedTuple):
    """One setting: our keys, the names in each of `PROGRAMS`, and a note."""

    keys: tuple[str, ...]
    names: tuple[tuple[str, ...], ...]
    note: str


class Foreign(NamedTuple):
    """What another program's setting is here."""

    program: str
    name: str
    row: Row


@cache
def rows() -> tuple[Row, ...]:
    """Return the table."""
    found = []
    for line in TABLE.strip().splitlines():
        keys, *names, note = (cell.strip() for cell in line.split("|"))
        found.append(Row(tuple(keys.split()), tuple(tuple(cell.split()) for cell in names), note))
    return tuple(found)


def exact(name: str) -> Foreign | None:
    """Return the setting that another program calls `name`, if one does."""
    name = spelt(name)
    return next((setting for setting in _all() if setting.name == name), None)


def here(known: Collection[str]) -> dict[str, Foreign]:
    """Return, by name, the settings of which there is something to say in a recipe with these keys.

    TRL's go before slime's and verl's, where they have the same name.
    """
    found: dict[str, Foreign] = {}
    for setting in _all():
        keys = setting.row.keys
        if not keys or any(key in known or key.startswith("--") for key in keys):
            found.setdefault(setting.name, setting)
    return found


def no_counterpart(name: str) -> str:
    """Return the end of a sentence about a name that is in no table of ours; "" if it may be."""
    if name.lstrip("+~-").replace("-", "_").partition(".")[0] not in TABLES:
        return ""
    return "; it has the form of verl's settings, and docs/coming-from.md lists those that are here"


def answer(found: Foreign, docs: Mapping[str, str] | None = None) -> str:
    """Return the end of a sentence that says what a setting of another program is here.

    `docs` has the comments of the recipe's own keys; None: the recipe is not known.
    """
    said, (keys, _, note) = f"; {found.program}'s {found.name!r}", found.row
    if not keys:
        return f"{said} is no setting here: {note}"
    here = [key for key in keys if docs is None or key in docs or key.startswith("--")]
    if not here:
        return f"{said} is {_either(keys)} in other recipes, and this one has no such setting"
    doc = docs.get(here[0], "") if docs and len(here) == 1 else ""
    about = note or re.sub(r"^\[[a-z0-9]+\] ", "", doc)
    return f"{said} is {_either(here)} here" + (f" ({about})" if about else "")


def _either(keys: Iterable[str]) -> str:
    return " or ".join(repr(key) for key in keys)


@cache
def _all() -> tuple[Foreign, ...]:
    return tuple(
        Foreign(program, name, row)
        for row in rows()
        for program, names in zip(PROGRAMS, row.names, strict=True)
        for name in names
    )


def spelt(name: str) -> str:
    """Return a name as the table has it: hydra's marks and the prefix left out, `-` as `_`."""
    return name.lstrip("+~-").replace("-", "_").removeprefix(PREFIX)
