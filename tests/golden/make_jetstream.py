"""The messages of JetStream's own stubs, as jetstream_0.2.2.binpb (a FileDescriptorProto): facts to compare ours with.

    pip install --no-deps --target DIR google-jetstream==0.2.2
    PYTHONPATH=DIR python tests/golden/make_jetstream.py

The package itself cannot be asked for in pyproject.toml: it needs TensorFlow, and has a package called benchmarks.
"""

from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto
from jetstream.core.proto import jetstream_pb2  # pyright: ignore[reportMissingImports]

if __name__ == "__main__":
    described = FileDescriptorProto()
    jetstream_pb2.DESCRIPTOR.CopyToProto(described)
    path = Path(__file__).parent / "jetstream_0.2.2.binpb"
    path.write_bytes(described.SerializeToString(deterministic=True))
