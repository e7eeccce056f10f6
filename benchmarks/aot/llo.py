"""Reads what libtpu dumps of a kernel: its bundles, spills and on-chip memory; knows no kernel."""

import re
from pathlib import Path

DUMP_FLAGS = "--xla_jf_dump_llo_text=true --xla_jf_dump_to="  # and a folder, in LIBTPU_INIT_ARGS before libtpu loads

_ALLOCATION = re.compile(r"space=(vmem|smem), size = (0x[0-9a-f]+), scoped")


def kernel_report(folder: Path, kernel: str) -> dict[str, int]:
    """Of the newest dump of a Mosaic kernel: bundles (VLIW instructions), spills, VMEM and SMEM (bytes).

    Spills are vector registers stored for want of registers; scalars of rare paths may rest in SMEM.

    Raises:
      FileNotFoundError: no dump of that kernel.
    """
    utilization = _newest(folder, f"*-{kernel}*final_hlo-static-per-bundle-utilization.txt")
    lines = utilization.read_text().splitlines()
    units = [unit.strip() for unit in lines[1].split(",")]
    bundles = [list(map(int, line.split())) for line in lines[4:] if line.split()[:1] and line.split()[0].isdigit()]
    spills = sum(bundle[units.index("VSTORE:SPILL")] for bundle in bundles)
    memory = {"vmem": 0, "smem": 0}
    for space, size in _ALLOCATION.findall(_newest(folder, f"*-{kernel}*-02-original.txt").read_text()):
        memory[space] += int(size, 16)
    return {"bundles": len(bundles), "spills": spills, "vmem_bytes": memory["vmem"], "smem_bytes": memory["smem"]}


def _newest(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime_ns)
    if not found:
        raise FileNotFoundError(f"no {pattern} in {folder}: did the kernel compile?")
    return found[-1]
