"""What compiled programs depend on, as names and readable values that two starts can compare; owns nothing."""

import dataclasses
import hashlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import flax
import jax
import jaxlib.version
from flax import nnx

from jaxserve.device.programs import Params, ProgramSpec
from pallas_kernels.kv_write import kernel_module
from pallas_kernels.native import cpu_features
from pallas_kernels.paged_attention import BackendName, backend_module

# `from models.step import (KVPool, …` and `from models.checkpoint import orbax`; our packages import nothing otherwise.
IMPORT = re.compile(r"^from ((?:jaxserve|models|pallas_kernels)[\w.]*) import (\([^)]*\)|.*)", re.MULTILINE)
ROOTS = ("jaxserve.device.programs", "models.registry")  # what runs, and the models that it may run
VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
JAX_OPTIONS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable")
# `shapes` only says which programs there are; the graph follows from the model, the parameters, `matmul_backend` and
# the code.
LEFT_OUT = ("shapes", "graph")
LONG_VALUE = 60  # characters; of longer ones, such as the CPU's features, only the words that differ are shown


def fingerprint(spec: ProgramSpec) -> dict[str, str]:
    """Everything that decides what the compiler makes of `spec`'s programs, the same in every process.

    Two programs of one name and equal fingerprints are interchangeable.
    """
    device = spec.mesh.devices.flat[0]
    fields = {
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "flax": flax.__version__,
        "platform": device.platform,
        "platform_version": device.client.platform_version,
        "device_kind": device.device_kind,
        "mesh": f"{dict(spec.mesh.shape)} on devices {[device.id for device in spec.mesh.devices.flat]}",
    }
    if device.platform == "cpu":
        # XLA compiles for the very CPU it runs on, and splits loops for its number of cores.
        fields |= {"cpu": cpu_features(), "cpu_count": str(os.cpu_count())}
    fields |= {name: os.environ.get(name, "") for name in VARIABLES}
    fields |= {name: str(getattr(jax.config, name)) for name in JAX_OPTIONS}
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if field.name in LEFT_OUT:
            continue
        if field.name == "params":
            fields["params"] = _describe_params(value)
        elif dataclasses.is_dataclass(value):
            fields |= {
                f"{field.name}.{part.name}": repr(getattr(value, part.name)) for part in dataclasses.fields(value)
            }
        elif field.name not in fields:  # the mesh is described above
            fields[field.name] = str(value)
    fields["code"] = hashlib.sha256(repr(sorted(program_sources(spec.backend.name).items())).encode()).hexdigest()
    assert not any(" at 0x" in value for value in fields.values()), "a value holds an address"
    return fields


def digest(fields: Mapping[str, str]) -> str:
    """One name for a fingerprint: 32 hexadecimal digits."""
    return hashlib.sha256(repr(sorted(fields.items())).encode()).hexdigest()[:32]


def differences(theirs: Mapping[str, str], ours: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """(field, their value, our value), in our order; a field that one side lacks is "absent" there."""
    return [
        (name, *_shortened(theirs.get(name, "absent"), ours.get(name, "absent")))
        for name in dict.fromkeys((*ours, *theirs))
        if theirs.get(name) != ours.get(name)
    ]


def program_sources(backend: BackendName) -> dict[str, str]:
    """Module name -> source, of `programs`, the models, the backend's kernels and all that they import of ours.

    A module's `SOURCES` are files that belong to it and that no import names: in another language, or imported late.
    """
    sources: dict[str, str] = {}
    kernels = (backend_module(backend), kernel_module(backend))
    to_read = [*ROOTS, *(module.__name__ for module in kernels if module is not None)]
    while to_read:
        name = to_read.pop()
        module = sys.modules.get(name)  # absent: the name of a function or a class, not of a module
        if module is not None and module.__file__ is not None and name not in sources:
            sources[name] = Path(module.__file__).read_text(encoding="utf-8")
            to_read += _imported(sources[name])
            sources |= {f"{name}: {path.name}": path.read_text() for path in getattr(module, "SOURCES", ())}
    return sources


def _imported(source: str) -> Iterator[str]:
    for match in IMPORT.finditer(source):
        yield match[1]
        yield from (f"{match[1]}.{name}" for name in re.findall(r"\w+", match[2]))


def _describe_params(params: Params) -> str:
    structs = [(path, param.get_value()) for path, param in nnx.to_flat_state(params)]
    lines = [f"{path} {struct.dtype}{list(struct.shape)} {_spec_of(struct)}" for path, struct in structs]
    dtypes = sorted({str(struct.dtype) for _, struct in structs})
    return f"{len(lines)} arrays of {', '.join(dtypes)}, {hashlib.sha256(repr(lines).encode()).hexdigest()[:16]}"


def _spec_of(struct: Any) -> str:
    return str(struct.sharding.spec)


def _shortened(theirs: str, ours: str) -> tuple[str, str]:
    if max(len(theirs), len(ours)) <= LONG_VALUE:
        return theirs, ours
    their_words, our_words = theirs.split(), ours.split()
    return (
        " ".join(word for word in their_words if word not in our_words) or "nothing more",
        " ".join(word for word in our_words if word not in their_words) or "nothing more",
    )
