"""What the network is and how its members are mixed, as `transformers` keeps it: config.json."""

from typing import Any

from transformers import PretrainedConfig


class Q0Config(PretrainedConfig):
    """The fields of q0lib's `config.Model`, and `mixture_weights`, one for each member."""

    model_type = "q0"
    attribute_map = {  # noqa: RUF012
        "hidden_size": "width",
        "max_position_embeddings": "context",
        "num_attention_heads": "heads",
        "num_hidden_layers": "layers",
    }

    def __init__(self, mixture_weights: tuple[float, ...] = (1.0,), **fields: Any) -> None:
        self.mixture_weights = list(mixture_weights)
        for name, default in (
            ("vocab_size", 2048), ("context", 256), ("layers", 4), ("width", 128), ("heads", 4),
            ("mlp_multiple", 64), ("windows", "L"), ("softcap", 15.0), ("unet_skips", True),
            ("residual_scalars", True), ("head_gates", True), ("value_projections", True),
            ("loop_start", 0), ("loop_end", 0), ("loop_passes", 1), ("multi_token", False),
        ):  # fmt: skip
            setattr(self, name, fields.pop(name, default))
        super().__init__(**{"tie_word_embeddings": False, **fields})
