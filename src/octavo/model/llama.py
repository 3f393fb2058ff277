"""The `llama` architecture: Llama 1 to 3, SmolLM, and the many that share its layer (Touvron et al. 2023)."""

from __future__ import annotations

from octavo.model.config import ModelConfig
from octavo.model.network import Network
from octavo.model.rope import rope_frequencies
from octavo.model.weights import Weights


def record_llama(config: ModelConfig, weights: Weights, network: Network) -> None:
    """Record the whole network: every layer reads and adds to one residual stream.

    Raises: ModelFileError for a tensor that is missing or does not fit.
    """
    width, head_dim = config.hidden_size, config.head_dim
    q_width, kv_width = config.num_heads * head_dim, config.num_kv_heads * head_dim
    eps = config.rms_norm_eps

    embeddings = weights.matrix("token_embd.weight", config.vocab_size, width)
    residual = network.embed(embeddings)
    for layer in range(config.num_layers):
        blk = f"blk.{layer}."
        x = network.rms_norm(residual, blk + "attn_norm.weight", eps)
        qkv = network.linear(
            x,
            [
                weights.matrix(blk + "attn_q.weight", q_width, width),
                weights.matrix(blk + "attn_k.weight", kv_width, width),
                weights.matrix(blk + "attn_v.weight", kv_width, width),
            ],
        )
        attended = network.rope_store_and_attend(qkv, config.num_heads, config.num_kv_heads, head_dim)
        network.add_linear(residual, attended, weights.matrix(blk + "attn_output.weight", width, q_width))

        x = network.rms_norm(residual, blk + "ffn_norm.weight", eps)
        network.gated_mlp(
            residual,
            x,
            gate=weights.matrix(blk + "ffn_gate.weight", config.intermediate_size, width),
            up=weights.matrix(blk + "ffn_up.weight", config.intermediate_size, width),
            down=weights.matrix(blk + "ffn_down.weight", width, config.intermediate_size),
        )
    if config.tie_word_embeddings:
        head = embeddings
    else:
        head = weights.matrix("output.weight", config.vocab_size, width)
    network.logits(residual, "output_norm.weight", eps, head)

    factors = (
        weights.vector("rope_freqs.weight", config.rope_dim // 2)
        if config.rope_scaling_type == "llama3"
        else None
    )
    network.rope(*rope_frequencies(config, factors))
