"""`ktc inspect --graph`: a bundle's decode graph and the memory that it takes here, weights aside."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ktc.graph.build import PREFILL_CHUNK, plan_layouts
from ktc.graph.render import render
from ktc.native.engine import DEFAULT_CONTEXT, load_program
from ktc.progress import counted

if TYPE_CHECKING:
    from ktc.bundle.reader import Bundle


def graph_text(bundle: Bundle, as_json: bool = False) -> str:
    """The program, its caches for the default context, and its scratch for decode and for a prefill chunk.

    Raises:
        UnsupportedModelError: the family has no decode graph.
    """
    from ktc import _runtime

    program = load_program(bundle)
    if as_json:
        return json.dumps(program.to_json(), indent=1) + "\n"
    threads = sum(len(node) for node in _runtime.numa_nodes())
    context = min(program.context, DEFAULT_CONTEXT)
    layouts = plan_layouts(program, threads, min(PREFILL_CHUNK, context), _runtime)
    arena = {f"steps of up to {counted(layout.max_rows, 'token')}": layout.nbytes for layout in layouts}
    return render(program, context, arena)
