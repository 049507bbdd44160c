"""OPT, and GPT-2 and -3 as published plans have them, which are planned and not trained."""

from __future__ import annotations

from hetctl.trainer.families.family import Family

GPT = Family("gpt", mlp_bias=False, gated=False)
OPT = Family(
    "opt",
    "OPTForCausalLM",
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    gated=False,
    norm="layer",
    learned_positions=2,
    activations=("relu",),
    config_keys={"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
    config_defaults={"tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    config_musts={
        "do_layer_norm_before": True,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "_remove_final_layer_norm": False,
    },
    tensor_names={
        "model.": "model.decoder.",
        "o_proj": "out_proj",
        "input_layernorm": "self_attn_layer_norm",
        "post_attention_layernorm": "final_layer_norm",
        "mlp.up_proj": "fc1",
        "mlp.down_proj": "fc2",
        "decoder.norm": "decoder.final_layer_norm",
    },
)
