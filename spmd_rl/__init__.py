"""RL post-training of language models in one torchrun world.

    import spmd_rl as rl

gives a recipe everything it names: the controller's types, the roles, the algorithms. Each name is
imported when it is first used, so that importing the package costs nothing and needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from spmd_rl.mkl import pin_sums

if TYPE_CHECKING:
    from spmd_rl.algo.advantages import group_advantage as group_advantage
    from spmd_rl.algo.advantages import rloo_advantage as rloo_advantage
    from spmd_rl.algo.algorithm import Algorithm as Algorithm
    from spmd_rl.algo.config import CorrectionConfig as CorrectionConfig
    from spmd_rl.algo.config import KlConfig as KlConfig
    from spmd_rl.algo.config import OverlongConfig as OverlongConfig
    from spmd_rl.algo.config import PolicyConfig as PolicyConfig
    from spmd_rl.algo.distill import distill_credit as distill_credit
    from spmd_rl.algo.distill import distill_gains as distill_gains
    from spmd_rl.algo.distill import distill_metrics as distill_metrics
    from spmd_rl.algo.distill import topk_kl_loss as topk_kl_loss
    from spmd_rl.algo.distill import with_candidates as with_candidates
    from spmd_rl.algo.dpo import bradley_terry_loss as bradley_terry_loss
    from spmd_rl.algo.dpo import dpo_loss as dpo_loss
    from spmd_rl.algo.gdpo import gdpo_advantage as gdpo_advantage
    from spmd_rl.algo.losses import LossInput as LossInput
    from spmd_rl.algo.losses import Needs as Needs
    from spmd_rl.algo.losses import ValueInput as ValueInput
    from spmd_rl.algo.losses import grpo_loss as grpo_loss
    from spmd_rl.algo.losses import sft_loss as sft_loss
    from spmd_rl.algo.make import make_algorithm as make_algorithm
    from spmd_rl.algo.packing import pack as pack
    from spmd_rl.algo.packing import pack_sft as pack_sft
    from spmd_rl.algo.pair_packing import pack_pairs as pack_pairs
    from spmd_rl.algo.policy.policy_loss import policy_loss as policy_loss
    from spmd_rl.algo.policy.rejection import accepted_samples as accepted_samples
    from spmd_rl.algo.sample_rewards import pack_samples as pack_samples
    from spmd_rl.algo.sample_rewards import with_rewards as with_rewards
    from spmd_rl.algo.self_check import check_reference as check_reference
    from spmd_rl.algo.value_loss import value_loss as value_loss
    from spmd_rl.check.engine import announce_correction as announce_correction
    from spmd_rl.check.engine import check_engine as check_engine
    from spmd_rl.check.evaluation import check_evaluation as check_evaluation
    from spmd_rl.check.evaluation import refuse_eval_rewards as refuse_eval_rewards
    from spmd_rl.check.inputs import check_inputs as check_inputs
    from spmd_rl.check.inputs import check_model as check_model
    from spmd_rl.config.dump import as_data as as_data
    from spmd_rl.config.rules import at_least as at_least
    from spmd_rl.config.run import RunConfig as RunConfig
    from spmd_rl.controller.call_queue import CallQueue as CallQueue
    from spmd_rl.controller.capabilities import Contracted as Contracted
    from spmd_rl.controller.capabilities import MemoryPlanner as MemoryPlanner
    from spmd_rl.controller.capabilities import Pumped as Pumped
    from spmd_rl.controller.capabilities import Saver as Saver
    from spmd_rl.controller.capabilities import Sleeper as Sleeper
    from spmd_rl.controller.capabilities import WeightProvider as WeightProvider
    from spmd_rl.controller.capabilities import WeightReceiver as WeightReceiver
    from spmd_rl.controller.completion import CompletionQueue as CompletionQueue
    from spmd_rl.controller.completion import as_completed as as_completed
    from spmd_rl.controller.controller import Controller as Controller
    from spmd_rl.controller.deferred import Deferred as Deferred
    from spmd_rl.controller.endpoint import Role as Role
    from spmd_rl.controller.endpoint import Sharded as Sharded
    from spmd_rl.controller.endpoint import collective as collective
    from spmd_rl.controller.endpoint import concurrent as concurrent
    from spmd_rl.controller.endpoint import local as local
    from spmd_rl.controller.endpoint import routed as routed
    from spmd_rl.controller.pending import Pending as Pending
    from spmd_rl.controller.routing import Route as Route
    from spmd_rl.data.documents import DocumentConfig as DocumentConfig
    from spmd_rl.data.documents import Documents as Documents
    from spmd_rl.data.pairs import PairConfig as PairConfig
    from spmd_rl.data.pairs import PreferencePair as PreferencePair
    from spmd_rl.data.pairs import PreferencePairs as PreferencePairs
    from spmd_rl.data.prompts import PromptConfig as PromptConfig
    from spmd_rl.data.prompts import Prompts as Prompts
    from spmd_rl.data.render.answer_end import AnswerEnd as AnswerEnd
    from spmd_rl.data.sft import SftPairs as SftPairs
    from spmd_rl.data.sft_file import SftFile as SftFile
    from spmd_rl.data.source import DataSource as DataSource
    from spmd_rl.errors import ConfigError as ConfigError
    from spmd_rl.errors import SpmdError as SpmdError
    from spmd_rl.errors import WeightMismatchError as WeightMismatchError
    from spmd_rl.evaluation.config import EvalConfig as EvalConfig
    from spmd_rl.evaluation.config import EvalSet as EvalSet
    from spmd_rl.evaluation.evaluation import Evaluation as Evaluation
    from spmd_rl.evaluation.held_out import HeldOutEvaluation as HeldOutEvaluation
    from spmd_rl.evaluation.held_out_config import DocumentEvalConfig as DocumentEvalConfig
    from spmd_rl.evaluation.held_out_config import HeldOutConfig as HeldOutConfig
    from spmd_rl.evaluation.held_out_config import held_out_sets as held_out_sets
    from spmd_rl.evaluation.held_out_scores import dpo_rewards as dpo_rewards
    from spmd_rl.evaluation.results import scores_table as scores_table
    from spmd_rl.evaluation.results import write_scores as write_scores
    from spmd_rl.hooks.child.conversation import Conversation as Conversation
    from spmd_rl.hooks.child.episode_engine import EpisodeEngine as EpisodeEngine
    from spmd_rl.hooks.config import HookConfig as HookConfig
    from spmd_rl.hooks.context import HookContext as HookContext
    from spmd_rl.hooks.context import Keep as Keep
    from spmd_rl.hooks.transcript import Transcript as Transcript
    from spmd_rl.hooks.transcript import Turn as Turn
    from spmd_rl.mesh.role_context import RoleContext as RoleContext
    from spmd_rl.mesh.split import PolicySplit as PolicySplit
    from spmd_rl.mesh.split import RoleSplit as RoleSplit
    from spmd_rl.mesh.split import SeparateSplit as SeparateSplit
    from spmd_rl.mesh.split import Split as Split
    from spmd_rl.model.lora import LoraConfig as LoraConfig
    from spmd_rl.model.tokenizer import has_tokenizer as has_tokenizer
    from spmd_rl.model.tokenizer import load_tokenizer as load_tokenizer
    from spmd_rl.observe.samples_file import read_groups as read_groups
    from spmd_rl.offload.config import OffloadConfig as OffloadConfig
    from spmd_rl.offload.ledger import TagBytes as TagBytes
    from spmd_rl.offload.phases import ALL as ALL
    from spmd_rl.offload.phases import COLOCATED as COLOCATED
    from spmd_rl.offload.phases import CONCURRENT as CONCURRENT
    from spmd_rl.offload.phases import Phases as Phases
    from spmd_rl.recipes.held_out import held_out_answers as held_out_answers
    from spmd_rl.recipes.held_out import pair_evaluation as pair_evaluation
    from spmd_rl.recipes.held_out import token_evaluation as token_evaluation
    from spmd_rl.recipes.load_prompts import load_prompts as load_prompts
    from spmd_rl.recipes.num_steps import check_schedule as check_schedule
    from spmd_rl.recipes.num_steps import check_steps as check_steps
    from spmd_rl.recipes.num_steps import first_step as first_step
    from spmd_rl.recipes.num_steps import num_steps as num_steps
    from spmd_rl.recipes.policy_run import PolicyRecipe as PolicyRecipe
    from spmd_rl.recipes.policy_run import PolicyRun as PolicyRun
    from spmd_rl.recipes.policy_update import PolicyUpdate as PolicyUpdate
    from spmd_rl.recipes.policy_update import algorithm_of as algorithm_of
    from spmd_rl.recipes.policy_update import extra_roles_of as extra_roles_of
    from spmd_rl.recipes.rollout_settings import rollout_settings as rollout_settings
    from spmd_rl.rewards.config import GraderConfig as GraderConfig
    from spmd_rl.rollout.engine import NativeEngineConfig as NativeEngineConfig
    from spmd_rl.rollout.engine import SamplingConfig as SamplingConfig
    from spmd_rl.rollout.engine import refuse_greedy as refuse_greedy
    from spmd_rl.rollout.engine import refuse_replay as refuse_replay
    from spmd_rl.rollout.group_sampler import GroupSampler as GroupSampler
    from spmd_rl.rollout.rollout import Rollout as Rollout
    from spmd_rl.rollout.sampler_config import SamplerConfig as SamplerConfig
    from spmd_rl.rollout.sampler_config import refuse_lag as refuse_lag
    from spmd_rl.rollout.sampler_config import refuse_sampler as refuse_sampler
    from spmd_rl.rollout.sglang.config import SglangEngineConfig as SglangEngineConfig
    from spmd_rl.train.config import FrozenConfig as FrozenConfig
    from spmd_rl.train.config import Fsdp2Config as Fsdp2Config
    from spmd_rl.train.config import OptimizerConfig as OptimizerConfig
    from spmd_rl.train.config import ParameterGroup as ParameterGroup
    from spmd_rl.train.config import TrainerConfig as TrainerConfig
    from spmd_rl.train.extra_role import ExtraRole as ExtraRole
    from spmd_rl.train.extra_role import reference_roles as reference_roles
    from spmd_rl.train.frozen import FrozenModel as FrozenModel
    from spmd_rl.train.trainer import Trainer as Trainer
    from spmd_rl.train.value_trainer import Critic as Critic
    from spmd_rl.train.value_trainer import ValueTrainer as ValueTrainer
    from spmd_rl.types.batch import Batch as Batch
    from spmd_rl.types.prompts import Prompt as Prompt
    from spmd_rl.types.samples import Group as Group
    from spmd_rl.types.samples import Sample as Sample
    from spmd_rl.types.sequence_ends import sequence_ends as sequence_ends
    from spmd_rl.types.token_values import SequenceValues as SequenceValues
    from spmd_rl.types.token_values import TokenValues as TokenValues
    from spmd_rl.types.token_values import TopLogprobs as TopLogprobs

__version__ = "0.1.0"

pin_sums()

_HOMES = {
    "algo.dpo": ("bradley_terry_loss", "dpo_loss"),
    "algo.distill": (
        "distill_credit",
        "distill_gains",
        "distill_metrics",
        "topk_kl_loss",
        "with_candidates",
    ),
    "algo.pair_packing": ("pack_pairs",),
    "algo.policy.rejection": ("accepted_samples",),
    "algo.sample_rewards": ("pack_samples", "with_rewards"),
    "data.render.answer_end": ("AnswerEnd",),
    "data.documents": ("DocumentConfig", "Documents"),
    "data.pairs": ("PairConfig", "PreferencePair", "PreferencePairs"),
    "data.sft_file": ("SftFile",),
    "algo.advantages": ("group_advantage", "rloo_advantage"),
    "algo.algorithm": ("Algorithm",),
    "algo.config": ("CorrectionConfig", "KlConfig", "OverlongConfig", "PolicyConfig"),
    "algo.gdpo": ("gdpo_advantage",),
    "algo.make": ("make_algorithm",),
    "algo.packing": ("pack", "pack_sft"),
    "algo.policy.policy_loss": ("policy_loss",),
    "algo.value_loss": ("value_loss",),
    "recipes.load_prompts": ("load_prompts",),
    "recipes.rollout_settings": ("rollout_settings",),
    "recipes.held_out": ("held_out_answers", "pair_evaluation", "token_evaluation"),
    "recipes.num_steps": ("check_schedule", "check_steps", "first_step", "num_steps"),
    "recipes.policy_run": ("PolicyRecipe", "PolicyRun"),
    "recipes.policy_update": ("PolicyUpdate", "algorithm_of", "extra_roles_of"),
    "algo.self_check": ("check_reference",),
    "algo.losses": ("LossInput", "Needs", "ValueInput", "grpo_loss", "sft_loss"),
    "types.batch": ("Batch",),
    "config.rules": ("at_least",),
    "controller.call_queue": ("CallQueue",),
    "config.dump": ("as_data",),
    "config.run": ("RunConfig",),
    "controller.capabilities": (
        "Contracted",
        "MemoryPlanner",
        "Pumped",
        "Saver",
        "Sleeper",
        "WeightProvider",
        "WeightReceiver",
    ),
    "controller.controller": ("Controller",),
    "controller.completion": ("CompletionQueue", "as_completed"),
    "controller.deferred": ("Deferred",),
    "controller.endpoint": ("Role", "Sharded", "collective", "concurrent", "local", "routed"),
    "controller.pending": ("Pending",),
    "controller.routing": ("Route",),
    "data.sft": ("SftPairs",),
    "data.source": ("DataSource",),
    "data.prompts": ("PromptConfig", "Prompts"),
    "errors": ("ConfigError", "SpmdError", "WeightMismatchError"),
    "hooks.config": ("HookConfig",),
    "hooks.context": ("HookContext", "Keep"),
    "hooks.child.conversation": ("Conversation",),
    "hooks.child.episode_engine": ("EpisodeEngine",),
    "hooks.transcript": ("Transcript", "Turn"),
    "mesh.role_context": ("RoleContext",),
    "mesh.split": ("PolicySplit", "RoleSplit", "SeparateSplit", "Split"),
    "model.lora": ("LoraConfig",),
    "model.tokenizer": ("has_tokenizer", "load_tokenizer"),
    "offload.config": ("OffloadConfig",),
    "offload.ledger": ("TagBytes",),
    "offload.phases": ("ALL", "COLOCATED", "CONCURRENT", "Phases"),
    "observe.samples_file": ("read_groups",),
    "check.engine": ("announce_correction", "check_engine"),
    "check.evaluation": ("check_evaluation", "refuse_eval_rewards"),
    "evaluation.config": ("EvalConfig", "EvalSet"),
    "evaluation.evaluation": ("Evaluation",),
    "evaluation.held_out": ("HeldOutEvaluation",),
    "evaluation.held_out_config": ("DocumentEvalConfig", "HeldOutConfig", "held_out_sets"),
    "evaluation.held_out_scores": ("dpo_rewards",),
    "evaluation.results": ("scores_table", "write_scores"),
    "check.inputs": ("check_inputs", "check_model"),
    "rewards.config": ("GraderConfig",),
    "rollout.engine": ("NativeEngineConfig", "SamplingConfig", "refuse_greedy", "refuse_replay"),
    "rollout.group_sampler": ("GroupSampler",),
    "rollout.rollout": ("Rollout",),
    "rollout.sampler_config": ("SamplerConfig", "refuse_lag", "refuse_sampler"),
    "rollout.sglang.config": ("SglangEngineConfig",),
    "train.config": (
        "FrozenConfig",
        "Fsdp2Config",
        "OptimizerConfig",
        "ParameterGroup",
        "TrainerConfig",
    ),
    "train.extra_role": ("ExtraRole", "reference_roles"),
    "train.frozen": ("FrozenModel",),
    "train.trainer": ("Trainer",),
    "train.value_trainer": ("Critic", "ValueTrainer"),
    "types.prompts": ("Prompt",),
    "types.samples": ("Group", "Sample"),
    "types.sequence_ends": ("sequence_ends",),
    "types.token_values": ("SequenceValues", "TokenValues", "TopLogprobs"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [*sorted(_HOME_OF), "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
