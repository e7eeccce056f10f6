"""Writes packed.npz: codes and zero points as compressed-tensors itself packs them.

pip install compressed-tensors==0.20.1 torch numpy && python tests/models/golden/make_packed.py
"""

from pathlib import Path

import numpy as np
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32


def main() -> None:
    rng = np.random.default_rng(0)
    arrays = {}
    for bits in (4, 8):
        half = 1 << (bits - 1)
        codes = rng.integers(-half, half, (16, 64)).astype(np.int8)
        zeros = rng.integers(-half, half, (16, 4)).astype(np.int8)
        arrays |= {
            f"{bits}.codes": codes,
            f"{bits}.zeros": zeros,
            f"{bits}.weight_packed": pack_to_int32(torch.from_numpy(codes), bits, packed_dim=1).numpy(),
            f"{bits}.weight_zero_point": pack_to_int32(torch.from_numpy(zeros), bits, packed_dim=0).numpy(),
        }
    np.savez_compressed(Path(__file__).parent / "packed.npz", **arrays)


if __name__ == "__main__":
    main()
