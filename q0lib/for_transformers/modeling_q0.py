"""A q0 model, or a mixture of several as one, for `transformers`: the network is network_q0.py."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from q0lib.for_transformers.configuration_q0 import Q0Config
from q0lib.model import GPT, mixed_logits


class Q0ForCausalLM(PreTrainedModel, GenerationMixin):
    """Members mixed in probability: the logits of several are log sum_i w_i p_i.

    It keeps no cache: `generate` reads its whole prefix anew for every token (`q0lib.load` has
    one). What is longer than the context is read from one of the places where q0lib's own
    generation would have begun afresh.
    """

    config_class = Q0Config
    _supports_cache_class = False

    def __init__(self, config: Q0Config) -> None:
        super().__init__(config)
        self.members = nn.ModuleList(GPT(config) for _ in config.mixture_weights)  # type: ignore[arg-type]
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _init_weights(self, module: nn.Module) -> None:
        """All weights come from the folder."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int = 0,
        **_: Any,
    ) -> CausalLMOutput:
        """Logits [B, T, V] in fp32, of the last `logits_to_keep` tokens (0: of all).

        `attention_mask` [B, T] may hide the first tokens of a row (padding on the left) or its
        last ones, which no other token sees.

        Raises:
            ValueError: more tokens than the context holds.
        """
        if input_ids.size(1) > self.config.context:
            raise ValueError(
                f"the model sees at most {self.config.context} tokens, got {input_ids.size(1)}"
            )
        padded = attention_mask is not None and not attention_mask[:, 0].all()
        if padded:  # each row turned until its first token stands first, and its logits back
            places = torch.arange(input_ids.size(1), device=input_ids.device)
            first = attention_mask.to(torch.int64).argmax(1, keepdim=True)  # type: ignore[union-attr]
            input_ids = input_ids.gather(1, (places + first) % input_ids.size(1))
        last = 0 if padded else logits_to_keep
        logits = mixed_logits(self.members, self.config.mixture_weights, input_ids, last=last)  # type: ignore[arg-type]
        if padded:
            back = ((places - first) % input_ids.size(1)).unsqueeze(-1)
            logits = logits.gather(1, back.expand_as(logits))[:, -logits_to_keep:]
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any
    ) -> dict[str, Any]:
        """The whole prefix, whatever is said to be cached, cut on the left to what fits."""
        context = self.config.context
        over = max(0, input_ids.size(1) - context)
        fresh = context + 1 - context // 2
        start = -(-over // fresh) * fresh
        if attention_mask is not None:
            attention_mask = attention_mask[:, start:]
        return {"input_ids": input_ids[:, start:], "attention_mask": attention_mask}
