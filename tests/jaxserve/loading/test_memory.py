"""Loading reads each tensor straight to its device, without a second copy of the checkpoint.

The memory it may take beside the arrays is one tensor, or one device's part of a parameter where
that is larger: all experts of a layer are one parameter. Converting holds one layer.
"""

import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

DENSE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}
MIXTURE = DENSE | {
    "architectures": ["MixtralForCausalLM"],
    "num_hidden_layers": 1,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
ALLOWANCE = 512 * 2**20  # the interpreter and jax are in it

# Prints the most that /proc/self/status had of anonymous memory beside live arrays, the bytes of
# the parameters, and of the largest part of one that a device has.
PROBE = """
import math, sys, threading
from pathlib import Path
import jax
from jaxserve.loading.convert import to_orbax
from tests.jaxserve.loading.loaded import load_params
from jaxserve.loading.spec import open_checkpoint
from jaxserve.sharding.mesh import MeshSpec

def anonymous():
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024

def held(x):  # on all devices: what several of them hold is there several times
    shard = math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    return shard * len(x.sharding.device_set)

def live():
    return sum(map(held, jax.live_arrays()))

most, done = 0, threading.Event()
def watch():
    global most
    while not done.wait(0.002):
        arrays = live()  # first: what is loaded meanwhile counts against us
        most = max(most, anonymous() - arrays)

watcher = threading.Thread(target=watch)
watcher.start()
expert, tensor = map(int, sys.argv[2:4])
jax.config.update("jax_num_cpu_devices", expert * tensor)
mesh = MeshSpec(expert=expert, tensor=tensor).build(jax.devices())
if sys.argv[5:]:
    params = {}
    to_orbax(Path(sys.argv[1]), Path(sys.argv[5]), lambda *_: None, weights=sys.argv[4])
else:
    params = load_params(open_checkpoint(Path(sys.argv[1])), mesh, weights=sys.argv[4])
done.set()
watcher.join()
leaves = jax.tree.leaves(params)
largest = max((held(x) // len(x.sharding.device_set) for x in leaves), default=0)
print(most, sum(x.nbytes for x in leaves), largest)
"""


def shapes_of(config: dict) -> dict[str, list[int]]:
    d, mlp, vocab = (config[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    shapes = {
        "model.embed_tokens.weight": [vocab, d],
        "lm_head.weight": [vocab, d],
        "model.norm.weight": [d],
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": [d, d] for name in "qkvo"}
        shapes |= {f"{prefix}{name}_layernorm.weight": [d] for name in ("input", "post_attention")}
        if experts := config.get("num_local_experts"):
            shapes |= {f"{prefix}block_sparse_moe.gate.weight": [experts, d]}
            for expert in range(experts):
                own = f"{prefix}block_sparse_moe.experts.{expert}."
                shapes |= {
                    f"{own}w1.weight": [mlp, d],
                    f"{own}w3.weight": [mlp, d],
                    f"{own}w2.weight": [d, mlp],
                }
        else:
            shapes |= {f"{prefix}mlp.{name}_proj.weight": [mlp, d] for name in ("gate", "up")}
            shapes |= {f"{prefix}mlp.down_proj.weight": [d, mlp]}
    return shapes


def write_sparse_checkpoint(folder: Path, config: dict) -> tuple[int, int]:
    """Write a bfloat16 checkpoint of zeros that takes no disk space.

    Returns the bytes in total and of the largest tensor.
    """
    header = {}
    end = 0
    largest = 0
    for name, shape in shapes_of(config).items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end = end + size
        largest = max(largest, size)
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    (folder / "config.json").write_text(json.dumps(config))
    return end, largest


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "expert", "tensor", "weights", "share"),
    [
        (DENSE, 1, 1, "auto", 1),
        (DENSE, 1, 4, "auto", 1),
        (DENSE, 1, 1, "int8", 0.623),
        (MIXTURE, 4, 1, "auto", 1),
        (MIXTURE, 2, 2, "auto", 1),
        (MIXTURE, 2, 2, "int8", 0.59),
    ],
)
def test_loading_gigabytes_takes_one_tensor_more(
    config: dict, expert: int, tensor: int, weights: str, share: float, tmp_path: Path
) -> None:
    """Loading takes one tensor beside the arrays.

    share: of the checkpoint's bytes; embedding and head are not quantized.
    """
    total, largest = write_sparse_checkpoint(tmp_path, config)
    assert 2e9 < total < 3e9
    command = [sys.executable, "-c", PROBE, str(tmp_path), str(expert), str(tensor), weights]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    beside, parameters, part = map(int, done.stdout.split())
    assert parameters == pytest.approx(total * share, rel=0 if share == 1 else 0.02)
    most = max(largest, part)
    assert beside < most + ALLOWANCE, (
        f"{beside / 2**20:.0f} MiB beside the arrays, the largest part {most / 2**20:.0f}"
    )


@pytest.mark.system
@pytest.mark.slow
def test_converting_takes_a_layer_and_restoring_a_tensor_more(tmp_path: Path) -> None:
    """Converting takes one layer, and loading the result one tensor, beside library buffers.

    Weights are not zeros, whose chunks would not be stored. The buffers of Orbax and TensorStore
    are as large as a layer.
    """
    (tmp_path / "source").mkdir()
    total, largest = write_sparse_checkpoint(tmp_path / "source", DENSE)
    fill(tmp_path / "source" / "model.safetensors", total)
    environment = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "1000000"
    }  # with which glibc gives back what is freed
    for folder, target in (("source", [str(tmp_path / "orbax")]), ("orbax", [])):
        command = [sys.executable, "-c", PROBE, str(tmp_path / folder), "1", "1", "int8", *target]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        beside = int(done.stdout.split()[0])
        assert beside < 2 * largest + ALLOWANCE < total / 2, (
            f"{folder}: {beside / 2**20:.0f} MiB beside the arrays"
        )


def fill(path: Path, size: int) -> None:
    """Fill the last bytes of the file with a pattern."""
    piece = bytes.fromhex("803c") * 2**23
    with path.open("r+b") as file:
        file.seek(-size, os.SEEK_END)
        for begin in range(0, size, len(piece)):
            file.write(piece[: size - begin])
