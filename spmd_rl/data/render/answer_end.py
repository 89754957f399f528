"""AnswerEnd: the tokens with which a chat template ends an answer, where a reward model is read.

An engine stops at an end-of-text token. Many templates render more: that of ChatML a line break. A
text of `apply_chat_template` has it, so a reward model is trained on it, and reads it in samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from spmd_rl.data.render.chat import Chat, render
from spmd_rl.data.render.eos import eos_ids
from spmd_rl.data.render.tokenizer import Tokenizer
from spmd_rl.errors import DataError
from spmd_rl.types.groups import Group
from spmd_rl.types.samples import Sample
from spmd_rl.types.token_data import TokenData

PROBE = "answer"  # an assistant's turn of which the template shows its end


@dataclass(frozen=True)
class AnswerEnd:
    """`tokens` stand after an answer, in place of one of `eos`, with which an engine ended it.

    A sequence has at most `context` tokens.
    """

    tokens: tuple[int, ...]
    eos: tuple[int, ...]
    context: int

    @staticmethod
    def of(judge: Tokenizer, policy: Tokenizer) -> AnswerEnd:
        """Return the end that the template of the reward model's tokenizer renders.

        The engine ends answers with an end-of-text token of the `policy`. Without a template of the
        judge's the policy's holds.
        Raises: DataError where the template refuses an answer, or does not show it.
        """
        tokenizer = judge if judge.chat_template else policy
        chat = Chat("the chat template", [{"role": "user", "content": "question"}], [], {})
        answered = replace(chat, messages=[*chat.messages, assistant(PROBE)])
        text = render(answered, tokenizer, generation_prompt=False)
        if PROBE not in text:
            raise DataError(chat.where, "it does not show an assistant's answer")
        end = text[text.rindex(PROBE) + len(PROBE) :]
        (tokens,) = tokenizer([end], add_special_tokens=False)["input_ids"]
        return AnswerEnd(tuple(tokens), eos_ids(policy), judge.context)

    def after(self, groups: list[Group]) -> list[Group]:
        """Return the groups with this end after each answer that ended, to a prompt of a template.

        An answer that was cut has none, nor has one for which the context has no room.
        """
        return [
            replace(group, samples=[self._after(one, group) for one in group.samples])
            if group.prompt.chat
            else group
            for group in groups
        ]

    def _after(self, sample: Sample, group: Group) -> Sample:
        ends_itself = bool(len(sample.tokens)) and int(sample.tokens[-1]) in self.eos
        num_kept = len(sample.tokens) - ends_itself
        num_tokens = len(group.prompt.tokens) + num_kept + len(self.tokens)
        if sample.status != "completed" or num_tokens >= self.context:
            return sample
        end = np.array(self.tokens, np.int32)
        own, observed = sample.data.cut(0, num_kept), TokenData.observed(end)
        mask = np.append(sample.mask[:num_kept], np.zeros(len(end), np.bool_))
        return sample.with_data(TokenData.join([own, observed]), mask=mask, kept=b"")


def assistant(content: str) -> dict[str, str]:
    """Return a message of the assistant."""
    return {"role": "assistant", "content": content}
