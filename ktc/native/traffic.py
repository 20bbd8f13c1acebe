"""What a decode step must read: bytes of weights a token, the roofline of decoding from memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ktc.graph.ir import Program
from ktc.native.weights import find_tensor, row_tables, wanted_tensors

if TYPE_CHECKING:
    from ktc.bundle.reader import Bundle


def weight_bytes_per_token(bundle: Bundle, program: Program, n_skipped: int = 0) -> int:
    """Bytes of weights that one decode step of one sequence reads, each once; caches and activations are not counted.

    Of a MoE block the share of its chosen experts, of an embedding one row, from the page cache, unless a linear
    multiplies by the same tensor. Modules that are callbacks into torch are not counted: their reads are not ktc's.

    Args:
        n_skipped: experts dropped per MoE block.
    Raises:
        BundleError: a tensor of the program is missing.
    """
    packed = {m.name: m.moe.experts for m in bundle.plan.moe_modules() if m.moe is not None}
    chosen: dict[str, float] = {}
    for node in program.nodes:
        if node.op == "moe_submit":
            experts = int(node.params["experts"]) if node.weights else packed[node.module]
            chosen[f"{node.module}.experts."] = (int(node.params["top_k"]) - n_skipped) / experts
    total = 0.0
    for (_, name), ref in wanted_tensors(bundle, program).items():
        prefix = name[: name.find(".experts.") + len(".experts.")] if ".experts." in name else ""
        total += ref.nbytes * chosen.get(prefix, 1.0)
    tables = [find_tensor(bundle, (None, name)) for name in row_tables(program)]
    return round(total + sum(ref.nbytes / ref.shape[0] for ref in tables))
