"""What is compiled for: one line a machine; knows nothing of kernels."""

from dataclasses import dataclass

from pallas_kernels.paged_attention import BackendName


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One absent machine.

    Attributes:
      topology: as `jaxserve.aot.topologies` names it.
      backends: those whose kernels are compiled for it; plain XLA is always one, to compare with.
      tensors: over how many devices whole steps are compiled, those that they fit.
    """

    topology: str
    backends: tuple[BackendName, ...]
    tensors: tuple[int, ...] = (1,)

    @property
    def kind(self) -> str:
        return self.topology.partition(":")[0]


TARGETS = {
    target.kind: target
    for target in (
        Target(topology="v5e:2x4", backends=("tpu", "xla"), tensors=(1, 8)),
        Target(topology="v6e:2x4", backends=("tpu", "xla"), tensors=(1, 8)),
        Target(topology="v5p:2x2x1", backends=("tpu", "xla")),
        Target(topology="h200", backends=("gpu_mosaic", "gpu_triton", "xla")),
        Target(topology="a100", backends=("gpu_triton", "xla")),
        Target(topology="b200", backends=("gpu_mosaic", "gpu_triton", "xla")),
    )
}
