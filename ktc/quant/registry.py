"""The quantisers by name and by what the layout stores. A new one is one file and one line here.

fp32 and bf16 are not quantisers: their tiles hold the (rounded) weights themselves.
"""

from __future__ import annotations

from ktc.layout import QuantScheme
from ktc.quant import int4_codebook, int4_group, int4_integer, int8
from ktc.quant.base import Quantizer

QUANTIZERS: dict[str, Quantizer] = {
    q.name: q for q in (int8.CHANNEL, int8.GROUP, int4_group.GROUP, int4_integer.INTEGER, int4_codebook.QUANTIZER)
}


def quantizer_for(scheme: QuantScheme) -> Quantizer:
    """The quantiser whose output `scheme` stores.

    Raises:
        ValueError: fp32 and bf16 have none, and neither has an unknown combination.
    """
    for quantizer in QUANTIZERS.values():
        if (quantizer.data_type, quantizer.scale) == (scheme.data_type, scheme.scale):
            return quantizer
    raise ValueError(f"no quantiser gives {scheme}; there are {', '.join(QUANTIZERS)}")
