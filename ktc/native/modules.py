"""The modules of a bundle that its decode graph calls: Hugging Face's code over the bundle's weights. Imports torch.

Built as `ktc.load` builds a whole model (ktc/engine/build.py), but of the modules that callback nodes name, what is
below them and the rotary embedding only: everything else is dropped before a byte of weights is read.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ktc.errors import BundleError
from ktc.graph.ir import Program
from ktc.plan.ir import Plan
from ktc.progress import Progress

if TYPE_CHECKING:
    from ktc.bundle.reader import Bundle
    from ktc.engine.kernels import Kernels
    from ktc.graph.callbacks import ModuleCallbacks

ROTARY = "model.rotary_emb"


def _below(name: str, modules: Collection[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def import_torch() -> None:
    """Import what called modules need, OpenMP made quiet first: later has no effect (ktc/engine/lane.py)."""
    from ktc.engine.lane import quiet_openmp

    quiet_openmp()
    import torch  # noqa: F401
    import transformers  # noqa: F401


def called_plan(plan: Plan, program: Program) -> Plan:
    """What the plan says of the modules that the program calls, and of those below them."""
    called = program.callbacks()
    return replace(plan, modules=tuple(m for m in plan.modules if _below(m.name, called)), tied={})


def module_bytes(bundle: Bundle, program: Program) -> tuple[int, int]:
    """(bytes read from the bundle, bytes in memory) for the modules that the program calls: all but packed weights are
    widened to fp32."""
    called = program.callbacks()
    read = held = 0
    for (_, name), ref in bundle.tensors.items():
        if _below(name, called) and ref.file.name != "goldens.safetensors":
            read += ref.nbytes
            wide = ref.dtype in ("BF16", "F16") and not name.endswith((".tiles", ".scale", ".mult"))
            held += ref.nbytes * (2 if wide else 1)
    return read, held


class BundleModules:
    """The modules, their weights and their caches. Whoever holds callbacks of them holds this.

    Attributes:
        callbacks: makes what callback nodes call.
    """

    def __init__(
        self,
        bundle: Bundle,
        program: Program,
        kernels: Kernels,
        *,
        context: int,
        progress: Progress | None = None,
        bind: bool = True,
    ) -> None:
        """
        Args: as `BundleWeights`; `context`: positions of the caches.
        Raises:
            BundleError: the program calls a module that the model does not have, or a tensor is missing.
        """
        import_torch()
        import torch

        from ktc.engine import build
        from ktc.engine.lane import Lane, single_threaded
        from ktc.engine.mla import KtcMLAAttention
        from ktc.engine.weights import WeightStore
        from ktc.graph.callbacks import ModuleCallbacks
        from ktc.models.registry import family_for, hf_config, meta_model

        config = hf_config(bundle.read_object("model/config.json"))
        model = meta_model(config)
        called = program.callbacks()
        names = {name for name, _ in model.named_modules()}
        for name in called:
            if name not in names or not name:
                raise BundleError(
                    f"{bundle.path}: the graph calls {name!r}, which the model does not have",
                    "compile the checkpoint again",
                )
        _drop_others(model, [*called, ROTARY])
        plan = called_plan(bundle.plan, program)
        build.replace_modules(model, plan, family_for(config))
        self._store = WeightStore(bundle, kernels.pool, progress, bind)
        build.fill(model, plan, self._store, kernels)
        model.config.dtype = torch.float32
        lane = Lane(kernels.pool.threads)
        for name, module in model.named_modules():
            if isinstance(module, KtcMLAAttention):
                module.lane = lane
            if name in called:
                single_threaded(module)
        self._model = model.eval()
        self.callbacks: ModuleCallbacks = ModuleCallbacks(model, context)

    @property
    def nbytes(self) -> int:
        tensors = [*self._model.parameters(), *self._model.buffers()]
        own: int = sum(t.numel() * t.element_size() for t in tensors)
        return int(self._store.nbytes) + own

    def native_operators(self) -> list[Any]:
        """Every packed Linear (and Moe) that the modules use."""
        found = (getattr(module, "native", None) for module in self._model.modules())
        return [native for native in found if native is not None]


def _drop_others(model: Any, kept: Collection[str]) -> None:
    """Remove every module that is not among `kept`, above one of them or below one."""
    for name, module in list(model.named_modules()):
        for child in list(module._modules):
            path = f"{name}.{child}" if name else child
            if not _below(path, kept) and not any(k.startswith(f"{path}.") for k in kept):
                module._modules[child] = None
