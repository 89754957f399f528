"""The Rollout role in one process: a model folder with a tokenizer, and transformers as the judge
of greedy answers.
"""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

from spmd_rl.errors import ConfigError, ResidencyError, SpmdError
from spmd_rl.hooks.config import HookConfig
from spmd_rl.mesh.split import Placement
from spmd_rl.mesh.world import World
from spmd_rl.observe.trace import Trace
from spmd_rl.rollout.engine import SamplingConfig
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.types.prompts import Prompt
from tests.unit.rollout.pumped import generated

REWARDS = "tests.unit.rollout.rewards"
transformers = pytest.importorskip("transformers")


class Seat:
    """All that the role asks of its place."""

    device = torch.device("cpu")
    placement = Placement("infer", (0,), {"dp": 1, "fsdp": 1, "tp": 1})
    shard_rank = 0
    row_shards = 1
    world = World(rank=0, size=1, local_rank=0, local_size=1, node=0, run_id="test", restart=0)
    rank = 0

    def __init__(self) -> None:
        self.trace = Trace()

    def all_gather_in_shard(self, blob: bytes) -> list[bytes]:
        return [blob]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small Qwen3 with a character tokenizer, written by transformers itself."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    path = tmp_path_factory.mktemp("model")
    alphabet = ["<pad>", "<eos>", *"0123456789+-=abcdefghij "]
    tokenizer = Tokenizer(
        models.WordLevel({piece: i for i, piece in enumerate(alphabet)}, unk_token="<pad>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    )
    fast.save_pretrained(path)
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=len(alphabet),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.3,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def new_role(folder):
    from spmd_rl.rollout.rollout import Rollout

    built = []

    def build(model=folder, seed=0, reward="", hooks=None, **cfg):
        engine = NativeEngineConfig(**{"max_batch": 8, **cfg})
        rewards = {f"{REWARDS}:{name}": 1.0 for name in reward.split()}
        hooks = hooks or HookConfig(processes=1)
        role = Rollout(engine, Seat(), str(model), seed, rewards, hooks)
        built.append(role)
        return role

    yield build
    for role in built:
        role.close()


def prompts(role, *texts: str) -> list[Prompt]:
    return [
        Prompt(uid, np.array(tokens, dtype=np.int32), text=text, answer=text[::-1])
        for uid, (text, tokens) in enumerate(
            zip(texts, role.tokenizer(list(texts))["input_ids"], strict=True)
        )
    ]


def test_groups_come_in_prompt_and_sample_order_with_text_and_reward(new_role):
    role = new_role(reward="count_zeros")
    asked = prompts(role, "1+1=", "12+3=", "a b")
    groups = generated(role, asked, SamplingConfig(num_samples=5, max_tokens=12))
    assert [group.prompt.uid for group in groups] == [0, 1, 2]
    for group in groups:
        assert [sample.index for sample in group.samples] == [0, 1, 2, 3, 4]
        for sample in group.samples:
            assert sample.text == role.tokenizer.decode(sample.tokens, skip_special_tokens=True)
            assert sample.reward == sample.text.count("0") / 10
            assert sample.parts["long"] == (len(sample.tokens) > 5)
            assert set(sample.versions.tolist()) == {0}


def test_time_in_the_reward_function_is_seen(new_role):
    for reward, seconds in (("slow", 0.04), ("count_zeros", 0.0)):
        role = new_role(reward=reward)
        asked, sampling = prompts(role, "1+1=", "2+2="), SamplingConfig(num_samples=2, max_tokens=4)
        for group in generated(role, asked, sampling):
            assert group.reward_time_s >= seconds
            assert reward == "slow" or group.reward_time_s < 0.04
    assert generated(new_role(), asked, sampling)[0].reward_time_s == 0


def test_several_rewards_and_one_of_the_whole_group(new_role):
    role = new_role(reward="count_zeros rank_of_length")
    (group,) = generated(role, prompts(role, "1+1="), SamplingConfig(num_samples=5, max_tokens=12))
    lengths = [len(sample.tokens) for sample in group.samples]
    order = sorted(range(5), key=lambda number: lengths[number])
    for number, sample in enumerate(group.samples):
        zeros, rank = sample.text.count("0") / 10, order.index(number)
        assert sample.reward == zeros + rank
        assert sample.parts["count_zeros"] == zeros
        assert sample.parts["rank_of_length"] == rank


def test_two_halves_of_the_prompts_give_what_one_rank_gives(new_role):
    role = new_role()
    asked, sampling = (
        prompts(role, "1+1=", "2+2=", "3+3=", "4+4="),
        SamplingConfig(num_samples=2, max_tokens=9),
    )
    together = generated(role, asked, sampling)
    apart = generated(new_role(max_batch=3), asked[:2], sampling) + generated(
        new_role(max_batch=1), asked[2:], sampling
    )
    for left, right in zip(together, apart, strict=True):
        for one, other in zip(left.samples, right.samples, strict=True):
            assert one.tokens.tobytes() == other.tokens.tobytes()
            assert one.logprobs.tobytes() == other.logprobs.tobytes()


def test_greedy_answers_are_those_of_transformers(new_role, folder):
    role = new_role()
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32
    ).eval()
    asked = prompts(role, "1", "12+34=", "0123456789+abcdefghij-0123456789", "j i h g")
    groups = generated(role, asked, SamplingConfig(temperature=0.0, max_tokens=40))
    for group in groups:
        expected = reference.generate(
            torch.tensor(group.prompt.tokens, dtype=torch.int64)[None],
            do_sample=False,
            max_new_tokens=40,
        )[0, len(group.prompt.tokens) :]
        assert group.samples[0].tokens.tolist() == expected.tolist()


def test_stop_string_through_the_tokenizer(new_role):
    role = new_role()
    (free,) = generated(role, prompts(role, "5+5="), SamplingConfig(max_tokens=30, ignore_eos=True))
    stop = free.samples[0].text[7:9]
    cut = free.samples[0].text.index(stop) + 2
    (group,) = generated(
        role, prompts(role, "5+5="), SamplingConfig(max_tokens=30, ignore_eos=True, stop=(stop,))
    )
    assert group.samples[0].text == free.samples[0].text[:cut]
    assert group.samples[0].status == "completed"


def test_an_end_of_the_tokenizer_that_the_model_has_no_token_for_is_left_out(new_role, monkeypatch):
    monkeypatch.setattr("spmd_rl.rollout.rollout.eos_ids", lambda tokenizer: (1, 20, 500))
    role = new_role()
    assert role._more_ends == (20,)
    generated(role, prompts(role, "5+5="), SamplingConfig(max_tokens=3))


def test_an_engine_that_is_too_large_for_the_host_names_what_asks_for_less(new_role, monkeypatch):
    def too_large(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr("spmd_rl.rollout.native.build.NativeEngine", too_large)
    with pytest.raises(
        ResidencyError, match="engine.max_batch = 8 and engine.num_pages = 9 ask for more memory"
    ):
        new_role(num_pages=9)


def test_the_tokenizers_end_ends_a_sample_like_the_configs(new_role):
    role = new_role()
    asked, free = prompts(role, "5+5="), SamplingConfig(max_tokens=30, ignore_eos=True)
    (whole,) = generated(role, asked, free)
    tokens = whole.samples[0].tokens.tolist()
    role._more_ends = (tokens[9],)
    assert generated(role, asked, free)[0].samples[0].tokens.tolist() == tokens
    (group,) = generated(role, asked, SamplingConfig(max_tokens=30))
    ends = [tokens.index(one) for one in (1, tokens[9]) if one in tokens]
    assert group.samples[0].tokens.tolist() == tokens[: min(ends) + 1]
    assert group.samples[0].status == "completed"


def test_ends_that_the_engine_does_not_know(new_role, folder, tmp_path):
    assert new_role()._more_ends == ()
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    (other / "generation_config.json").write_text('{"eos_token_id": 0}')
    assert new_role(model=other)._more_ends == (1,)


def test_a_reward_that_raises_shows_the_sample_and_leaves_the_engine_clean(new_role):
    role = new_role(reward="broken")
    asked, sampling = prompts(role, "7+8="), SamplingConfig(num_samples=4, max_tokens=5)
    with pytest.raises(SpmdError, match=r"prompt '7\+8=', answer '=8\+7'.*ZeroDivisionError"):
        generated(role, asked, sampling)
    assert not role.engine.has_work
    assert role._flow.snapshots() == []


@pytest.mark.parametrize("poisoned", [1, 3])
def test_a_poisoned_sample_fails_alone_if_the_config_says_so(new_role, poisoned: int):
    """Its group goes on without it, or is emptied when that leaves a single sample; other groups
    are as ever.
    """
    role = new_role(
        reward={1: "hangs_on_one", 3: "hangs_on_three"}[poisoned],
        hooks=HookConfig(processes=1, deadline_s=1.0, on_error="fail"),
    )
    asked, sampling = prompts(role, "7+8=", "1+1="), SamplingConfig(num_samples=4, max_tokens=5)
    whole, struck = generated(role, asked, sampling)
    assert ([sample.reward for sample in whole.samples], whole.failed) == ([0, 1, 2, 3], [])
    assert [sample.reward for sample in struck.samples] == ([1, 2, 3] if poisoned == 1 else [])
    assert [sample.index for sample in struck.failed] == [*range(poisoned)]
    for sample in struck.failed:
        why = sample.metadata["error"]
        assert "prompt '1+1='" in why
        assert why.endswith("took longer than 1 s")
        assert (sample.status, len(sample.tokens)) == ("failed", 5)


def test_two_prompts_with_one_uid_are_refused(new_role):
    role = new_role()
    with pytest.raises(SpmdError, match="same uid"):
        generated(role, prompts(role, "1")[:1] * 2, SamplingConfig())


def test_without_folder_weights_the_first_push_is_waited_for(new_role):
    role, donor = new_role(load_weights=False), new_role()
    asked, sampling = prompts(role, "1+1="), SamplingConfig(max_tokens=6)
    with pytest.raises(SpmdError, match="no weights of a known version: push one"):
        generated(role, asked, sampling)
    sink, source = role.weight_sink(), donor.weight_sink()
    assert sink.layout(0) == source.layout(0)
    for piece in sink.layout(0).pieces:
        sink.slot(piece.name, piece.box).copy_(source.slot(piece.name, piece.box))
    sink.commit(3)
    (pushed,), (own,) = generated(role, asked, sampling), generated(donor, asked, sampling)
    assert pushed.samples[0].logprobs.tobytes() == own.samples[0].logprobs.tobytes()
    assert set(pushed.samples[0].versions.tolist()) == {3}


def test_sleep_wake_and_stats(new_role):
    role = new_role()
    role.sleep()
    assert role.stats()[0]["kv_bytes"] == 0
    role.wake()
    generated(
        role, prompts(role, "1+1="), SamplingConfig(num_samples=3, max_tokens=4, ignore_eos=True)
    )
    assert role.stats()[0]["num_generated_tokens"] == 12


def test_a_missing_folder_is_one_sentence(new_role):
    with pytest.raises(ConfigError, match="no model folder at"):
        new_role(model="/nowhere")


def test_a_call_may_have_a_seed_of_its_own(new_role):
    """The role's seed draws the samples of a call without one, and no others."""

    def drawn(role, **seed):
        (group,) = generated(role, prompts(role, "5+5="), sampling, **seed)
        return [sample.tokens.tolist() for sample in group.samples]

    sampling = SamplingConfig(num_samples=4, max_tokens=8, ignore_eos=True)
    role, other = new_role(), new_role(seed=7)
    first, seventh = drawn(role), drawn(other)
    assert first != seventh
    assert drawn(role, seed=7) == seventh
    assert drawn(other, seed=0) == first
    assert drawn(role) == first
    with pytest.raises(ConfigError, match=r"^seed = -1: expected in \[0, 2\^63\)"):
        generated(role, prompts(role, "5+5="), sampling, seed=-1)


def test_a_prompt_may_name_its_own_reward_functions(new_role):
    hooks = HookConfig(processes=1, extra_rewards=(f"{REWARDS}:slow",))
    role = new_role(reward="count_zeros", hooks=hooks)
    first, second = prompts(role, "1+1=", "2+2=")
    second = second.replace(reward={f"{REWARDS}:slow": 3.0})
    groups = generated(role, [first, second], SamplingConfig(num_samples=2, max_tokens=4))
    assert all(sample.parts.keys() == {"reward", "long"} for sample in groups[0].samples)
    assert [sample.reward for sample in groups[1].samples] == [3.0, 3.0]


def test_without_a_reward_of_the_run_only_prompts_that_name_one_are_graded(new_role):
    hooks = HookConfig(processes=1, extra_rewards=(f"{REWARDS}:slow",))
    role = new_role(hooks=hooks)
    first, second = prompts(role, "1+1=", "2+2=")
    second = second.replace(reward={f"{REWARDS}:slow": 1.0})
    groups = generated(role, [first, second], SamplingConfig(num_samples=2, max_tokens=4))
    assert np.isnan([sample.reward for sample in groups[0].samples]).all()
    assert [sample.reward for sample in groups[1].samples] == [1.0, 1.0]
