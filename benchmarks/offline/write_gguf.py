"""The benchmark's model as a GGUF file for llama.cpp.

Started by benchmarks.offline in the peers' environment (gguf, numpy; nothing of jaxserve):

    python write_gguf.py FOLDER PRECISION FILE.gguf

PRECISION is f32, bf16 or q8_0. Q and K are not reordered for llama.cpp's rotation, and there is no
tokenizer: the weights are random, so that only the speed means something.
"""

import json
import sys
from pathlib import Path

import gguf  # pyright: ignore[reportMissingImports]
from safetensors.torch import load_file  # pyright: ignore[reportMissingImports]

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "model.norm.weight": "output_norm.weight",
}
LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    """Return llama.cpp's name of a tensor."""
    if name in NAMES:
        return NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[rest.removesuffix('.weight')]}.weight"


def main() -> None:
    folder = Path(sys.argv[1])
    precision = sys.argv[2]
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(sys.argv[3], "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    kind = gguf.GGMLQuantizationType[precision.upper()]
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.float().numpy()
        if values.ndim == 1:
            writer.add_tensor(gguf_name(name), values)
        else:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
