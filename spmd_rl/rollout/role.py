"""The Rollout role: prompts in, graded groups of samples out."""

from __future__ import annotations

from dataclasses import replace

import torch

from spmd_rl.controller.endpoint import Role, Sharded, collective
from spmd_rl.errors import SpmdError
from spmd_rl.mesh.place import Place
from spmd_rl.model.hf import has_weights, load_weights
from spmd_rl.model.network import CausalLM
from spmd_rl.model.spec import ModelSpec
from spmd_rl.model.tokenizer import load_tokenizer
from spmd_rl.rewards.grade import grade
from spmd_rl.rewards.load import resolve_reward
from spmd_rl.rollout.engine import Engine, EngineConfig, Request, SamplingConfig
from spmd_rl.rollout.native.engine import NativeEngine
from spmd_rl.types import Group, Prompt, Sample
from spmd_rl.weights.held import Held

FOLDER_VERSION = 0


class Rollout(Role):
    """One engine a rank, each with the whole model; prompts are spread over the data axis."""

    def __init__(self, cfg: EngineConfig, place: Place) -> None:
        super().__init__(cfg, place)
        self.tokenizer = load_tokenizer(cfg.model)
        self.reward = resolve_reward(cfg.reward) if cfg.reward else None
        self.model = build_model(cfg, place.device)
        self.engine: Engine = NativeEngine(self.model, cfg, place.device, decode=self._decode)
        if cfg.load_weights and has_weights(cfg.model):
            load_weights(self.model, cfg.model)
            self.engine.new_version(FOLDER_VERSION)

    @collective
    def generate(self, prompts: Sharded[list[Prompt]], sampling: SamplingConfig) -> Sharded[list[Group]]:
        """All samples of all prompts, graded where there is a reward function.

        Blocks: until the last sample of this rank's prompts is finished; nobody else is waited for.
        """
        by_uid = {prompt.uid: prompt for prompt in prompts}
        if len(by_uid) < len(prompts):
            raise SpmdError("two prompts of one call have the same uid, so their samples would be drawn alike")
        samples: dict[int, list[Sample]] = {uid: [] for uid in by_uid}
        try:
            for prompt in prompts:
                for index in range(sampling.num_samples):
                    self.engine.submit(Request(prompt.uid, index, prompt.tokens, sampling))
            while self.engine.has_work:
                for sample in self.engine.step().finished:
                    samples[sample.prompt_uid].append(self._complete(by_uid[sample.prompt_uid], sample))
        finally:
            self.engine.abort()
        return [Group(prompt, sorted(samples[prompt.uid], key=lambda sample: sample.index)) for prompt in prompts]

    @collective
    def stats(self) -> Sharded[list[dict[str, int]]]:
        """The engine's counts, one entry a rank."""
        return [self.engine.stats()]

    @collective
    def sleep(self) -> None:
        """Give the KV memory back; weights stay."""
        self.engine.sleep()

    @collective
    def wake(self) -> None:
        self.engine.wake()

    def weight_sink(self) -> Held:
        """Where pushed weights go: this engine's own parameters."""
        return Held.whole(dict(self.model.named_parameters()))

    def on_weights(self, version: int) -> None:
        """The parameters now hold `version`, on every rank of the role."""
        self.engine.new_version(version)

    def _decode(self, tokens: tuple[int, ...]) -> str:
        return self.tokenizer.decode(list(tokens))

    def _complete(self, prompt: Prompt, sample: Sample) -> Sample:
        text = self.tokenizer.decode(sample.tokens.tolist(), skip_special_tokens=True)
        sample = replace(sample, text=text)
        return grade(self.reward, prompt, sample) if self.reward else sample


def build_model(cfg: EngineConfig, device: torch.device) -> CausalLM:
    """The model of the folder's config with parameters in unset memory: weights come by `load_weights` or a push."""
    with torch.device("meta"):
        model = CausalLM(ModelSpec.from_folder(cfg.model))
    return model.to(getattr(torch, cfg.dtype)).to_empty(device=device).requires_grad_(False)
