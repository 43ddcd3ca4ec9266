"""Peak arithmetic of devices, by name and precision: a table of what the makers publish. No torch: plans read it."""

from __future__ import annotations

import re

TERA = 1e12

_PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    # The first pattern that is found in the device's name holds. TFLOP/s, dense (never the doubled "with sparsity"), for
    # products that accumulate in fp32, at boost clock: datasheets and architecture whitepapers of NVIDIA and AMD.
    # A precision that is not listed is not known, or is not done in hardware.
    (r"\bMIG\b", {}),  # a slice of a GPU has a share of its peak that its name does not tell
    (r"GB200", {"bf16": 2500, "fp16": 2500, "tf32": 1250, "fp32": 80}),
    (r"\bB200\b", {"bf16": 2250, "fp16": 2250, "tf32": 1125, "fp32": 75}),
    (r"\bGH200\b", {"bf16": 989, "fp16": 989, "tf32": 494, "fp32": 67}),
    (r"\bH200 NVL", {"bf16": 835, "fp16": 835, "tf32": 417, "fp32": 60}),
    (r"\bH200\b", {"bf16": 989, "fp16": 989, "tf32": 494, "fp32": 67}),
    (r"\bH100 NVL", {"bf16": 835, "fp16": 835, "tf32": 417, "fp32": 60}),
    (r"\bH100 PCIe", {"bf16": 756, "fp16": 756, "tf32": 378, "fp32": 51}),
    (r"\bH[18]00\b.*(SXM|HBM3)", {"bf16": 989, "fp16": 989, "tf32": 494, "fp32": 67}),
    (r"\bA[18]00\b", {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5}),
    (r"\bA30\b", {"bf16": 165, "fp16": 165, "tf32": 82, "fp32": 10.3}),
    (r"\bA40\b", {"bf16": 149.7, "fp16": 149.7, "tf32": 74.8, "fp32": 37.4}),
    (r"\bA10\b", {"bf16": 125, "fp16": 125, "tf32": 62.5, "fp32": 31.2}),
    (r"RTX A6000", {"bf16": 154.8, "fp16": 154.8, "tf32": 77.4, "fp32": 38.7}),
    (r"\bL40S\b", {"bf16": 362, "fp16": 362, "tf32": 183, "fp32": 91.6}),
    (r"\bL40\b", {"bf16": 181, "fp16": 181, "tf32": 90.5, "fp32": 90.5}),
    (r"\bL4\b", {"bf16": 121, "fp16": 121, "tf32": 60, "fp32": 30.3}),
    (r"V100.*(SXM|NVLink)", {"fp16": 125, "fp32": 15.7}),
    (r"V100.*PCIe?", {"fp16": 112, "fp32": 14}),
    (r"\bT4\b", {"fp16": 65, "fp32": 8.1}),
    (r"P100.*SXM", {"fp16": 21.2, "fp32": 10.6}),
    (r"P100.*PCIe?", {"fp16": 18.7, "fp32": 9.3}),
    (r"RTX 5090\b(?! D| Laptop)", {"bf16": 209.5, "fp16": 209.5, "tf32": 104.8, "fp32": 104.8}),
    (r"RTX 4090\b(?! D| Laptop)", {"bf16": 165.2, "fp16": 165.2, "tf32": 82.6, "fp32": 82.6}),
    (r"RTX 3090\b(?! Ti)", {"bf16": 71, "fp16": 71, "tf32": 35.6, "fp32": 35.6}),
    (r"MI300X", {"bf16": 1307.4, "fp16": 1307.4, "tf32": 653.7, "fp32": 163.4}),
)


def peak_flops(name: str, precision: str, tf32: bool = False) -> float | None:
    """FLOP/s that one device can do at most; None where that is not known, which is never guessed.

    Args:
        name: The device's name as torch or NVML gives it, such as `NVIDIA A100-SXM4-80GB`.
        precision: `fp32`, `bf16` or `fp16`; anything else is not known.
        tf32: Whether fp32 products may be done in TF32 (`torch.backends.cuda.matmul.allow_tf32`).
    """
    column = "tf32" if tf32 and precision == "fp32" else precision
    for pattern, row in _PEAKS:
        if re.search(pattern, name, re.IGNORECASE):
            return row[column] * TERA if column in row else None
    return None
