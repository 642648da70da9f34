"""Loading reads each tensor straight into its place, quantized or not: no second copy of the checkpoint in memory."""

import json
import math
import struct
import subprocess
import sys
from pathlib import Path

import pytest

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 9,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}
ALLOWANCE = 512 * 2**20  # the interpreter and jax are in it

# Prints the most that /proc/self/status had of anonymous memory beside live arrays, and the bytes of the parameters.
PROBE = """
import sys, threading
from pathlib import Path
import jax
from checkpoints.hf import HFCheckpoint
from jaxserve.load import load_params
from sharding.mesh import MeshSpec

def anonymous():
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024

def live():
    return sum(x.nbytes for x in jax.live_arrays())

most, done = 0, threading.Event()
def watch():
    global most
    while not done.wait(0.002):
        arrays = live()  # first: what is loaded meanwhile counts against us
        most = max(most, anonymous() - arrays)

watcher = threading.Thread(target=watch)
watcher.start()
mesh = MeshSpec().build(jax.devices())
params = load_params(HFCheckpoint.open(Path(sys.argv[1])), mesh, weights=sys.argv[2])
done.set()
watcher.join()
print(most, sum(x.nbytes for x in jax.tree.leaves(params)))
"""


def write_sparse_checkpoint(folder: Path) -> tuple[int, int]:
    """A checkpoint of zeros in bfloat16 that takes no room on the disk; bytes in all, and of the largest tensor."""
    d, mlp, vocab = (SHAPE[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    shapes = {"model.embed_tokens.weight": [vocab, d], "lm_head.weight": [vocab, d], "model.norm.weight": [d]}
    for layer in range(SHAPE["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": [d, d] for name in "qkvo"}
        shapes |= {f"{prefix}mlp.{name}_proj.weight": [mlp, d] for name in ("gate", "up")}
        shapes |= {f"{prefix}mlp.down_proj.weight": [d, mlp]}
        shapes |= {f"{prefix}{name}_layernorm.weight": [d] for name in ("input", "post_attention")}
    header, end, largest = {}, 0, 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end, largest = end + size, max(largest, size)
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return end, largest


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "share"), [("auto", 1), ("int8", 0.57)])
def test_loading_four_gigabytes_takes_one_tensor_more(weights: str, share: float, tmp_path: Path) -> None:
    """share: of the checkpoint's bytes; embedding and head stay what they are."""
    total, largest = write_sparse_checkpoint(tmp_path)
    assert 4e9 < total < 4.5e9
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(tmp_path), weights], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    beside, parameters = map(int, done.stdout.split())
    assert parameters == pytest.approx(total * share, rel=0 if share == 1 else 0.02)
    assert beside < largest + ALLOWANCE, f"{beside / 2**20:.0f} MiB beside the arrays, the largest tensor {largest}"
