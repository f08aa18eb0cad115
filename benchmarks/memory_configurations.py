"""The configurations whose memory and time are estimated and compiled: all shipped models, in many forms."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

import jshard as js
from benchmarks.grid.cells import FASTEST, GPUS, JSHARD, cells_of
from benchmarks.planned import SMALL
from jshard.cluster.compile import CompileRequest, UnitSettings, as_text
from jshard.cluster.topology import parse_topology

_MODELS = Path(__file__).parents[1] / "models"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configuration:
    """A recipe of a model file on a cluster."""

    name: str  # for the table
    model: str  # of `models`, without its ending
    recipe: str  # of the file
    topology: str  # in the form of `--topology`
    settings: tuple[str, ...] = ()  # in the form of `--set`
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)  # degrees; `fsdp` takes the other devices
    units: UnitSettings = dataclasses.field(default_factory=dict)  # in the form of `--unit`

    @property
    def label(self) -> str:
        """Its name with that of the model file, which `--only` matches."""
        return f"{self.model} {self.name}"

    @property
    def command(self) -> str:
        """The command that reports the compiled figures."""
        words = ["jshard", "plan", f"models/{self.model}.py", "--recipe", self.recipe, "--topology", self.topology]
        for setting in self.settings:
            words += ["--set", setting]
        for name, value in self.units.items():
            words += ["--unit", f"{name}={as_text(value)}"]
        if self.mesh:
            degrees = [f"{axis}={degree}" for axis, degree in self.mesh.items()]
            words += ["--mesh", ",".join(degrees)]
        return shlex.join(words)

    @property
    def sizes(self) -> dict[str, int]:
        """The degrees of all axes of its mesh."""
        num_devices = parse_topology(self.topology).num_devices
        return dict(js.mesh(**self.mesh, devices=num_devices).shape)

    @property
    def request(self) -> CompileRequest:
        """The program to compile."""
        return CompileRequest(
            model=str(_MODELS / f"{self.model}.py"),
            recipe=self.recipe,
            settings=self.settings,
            mesh=self.sizes,
            units=self.units,
            topology=self.topology,
            profile="fastest",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Base:
    """A recipe with some sizes: several configurations have it in common."""

    model: str
    recipe: str
    settings: tuple[str, ...] = ()

    def on(
        self,
        topology: str,
        name: str,
        *settings: str,
        mesh: Mapping[str, int] | None = None,
        **units: bool | int | str | None,
    ) -> Configuration:
        """Returns it on a cluster, with other or further settings of the recipe, and settings of the units."""
        by_key = {setting.partition("=")[0]: setting for setting in (*self.settings, *settings)}
        return Configuration(
            name=name,
            model=self.model,
            recipe=self.recipe,
            topology=topology,
            settings=tuple(by_key.values()),
            mesh=mesh or {},
            units=units,
        )


_XLA = "model.attention=xla"  # scores are written to memory
_SCAN = "model.scan=true"
_UNROLLED = "model.scan=false"
_WHOLE = "accumulate=1"
_IN_HOST, _IN_A100, _IN_HOSTS, _IN_64_HOSTS = "h100:1x8", "a100-80:1x8", "h100:8x8", "h100:64x8"
_FEW_LAYERS = "model.n_layer=8"

# ---- models/gpt.py

_124M = _Base(model="gpt", recipe="gpt2_small")
_124M_WHOLE = dataclasses.replace(_124M, settings=(_WHOLE, "batch_size=64"))
_500M = _Base(
    model="gpt",
    recipe="gpt2_small",
    settings=(
        _WHOLE,
        "batch_size=64",
        "model.n_layer=8",
        "model.n_head=16",
        "model.d_model=2048",
        "model.d_ff=8192",
        "model.vocab_size=50304",
    ),
)
_1600M = _Base(model="gpt", recipe="gpt2_xl")
_175B = _Base(model="gpt", recipe="gpt3_175b")
_13B = dataclasses.replace(
    _175B, settings=("batch_size=1024", "model.n_layer=40", "model.n_head=40", "model.d_model=5120", "model.d_ff=20480")
)
_GPT = (
    _124M_WHOLE.on(_IN_HOST, "124M"),
    _124M.on(_IN_HOST, "124M, 5 microbatches"),
    _124M_WHOLE.on(_IN_HOST, "124M, dots", remat="dots"),
    _124M_WHOLE.on(_IN_HOST, "124M, full, plain attention", _XLA, remat="full"),
    _124M_WHOLE.on(_IN_HOST, "124M, auto, plain attention", _XLA),
    _124M_WHOLE.on(_IN_A100, "124M, scan, auto", _SCAN),
    _124M_WHOLE.on(_IN_A100, "124M, scan, dots, plain attention", _SCAN, _XLA, remat="dots"),
    _500M.on(_IN_HOSTS, "0.5B"),
    _500M.on(_IN_HOSTS, "0.5B, full", remat="full"),
    _500M.on(_IN_HOSTS, "0.5B, full, plain attention", _XLA, remat="full"),
    _500M.on(_IN_HOSTS, "0.5B, scan", _SCAN, remat="none"),
    _500M.on(_IN_HOSTS, "0.5B, scan, full, 2 ahead", _SCAN, remat="full", prefetch=2),
    _500M.on(_IN_HOSTS, "0.5B, scan, dots, 4 microbatches", _SCAN, "accumulate=4", "batch_size=1024", remat="dots"),
    _500M.on(
        _IN_HOSTS, "0.5B, scan, full, zero2, plain attention", _SCAN, _XLA, remat="full", reshard_after_forward=False
    ),
    _500M.on(_IN_HOSTS, "0.5B, scan, dots, hpz", _SCAN, remat="dots", reshard_after_forward=8),
    _500M.on(_IN_HOST, "0.5B, scan, full, tensor 2", _SCAN, mesh={"tensor": 2}, remat="full"),
    _500M.on(_IN_HOST, "0.5B, scan, dots, tensor 8", _SCAN, mesh={"tensor": 8}, remat="dots"),
    _500M.on(
        _IN_HOST,
        "0.5B, scan, dots, tensor 4, split sequence",
        _SCAN,
        "model.split_sequence=true",
        mesh={"tensor": 4},
        remat="dots",
    ),
    _1600M.on(_IN_HOSTS, "1.6B, none", "batch_size=64", remat="none"),
    _1600M.on(_IN_HOSTS, "1.6B, dots", remat="dots"),
    _1600M.on(_IN_HOSTS, "1.6B, full"),
    _1600M.on(_IN_HOSTS, "1.6B, full, zero2", reshard_after_forward=False),
    _1600M.on(_IN_HOSTS, "1.6B, full, hsdp", mesh={"replica": 8, "fsdp": 8}),
    _1600M.on(_IN_HOSTS, "1.6B, full, hsdp, plain attention", _XLA, mesh={"replica": 8, "fsdp": 8}),
    _1600M.on(_IN_HOSTS, "1.6B, full, optimizer in host memory", "model.offload=optimizer"),
    _1600M.on(_IN_HOSTS, "1.6B, full, zero2, 4 microbatches", "accumulate=4", reshard_after_forward=False),
    _1600M.on(_IN_HOSTS, "1.6B, dots, pipe 2", mesh={"pipe": 2}, remat="dots"),
    _13B.on(_IN_64_HOSTS, "13B, full"),
    _175B.on(_IN_64_HOSTS, "175B, full", "batch_size=512"),
    _175B.on(_IN_64_HOSTS, "175B, full, tensor 8", "batch_size=256", mesh={"tensor": 8}),
    _175B.on("h100:2048x8", "175B, full, hsdp of 512", "batch_size=16384", mesh={"replica": 32, "fsdp": 512}),
)

# ---- models/llama.py

_8B = _Base(model="llama", recipe="llama3_8b", settings=(_WHOLE, "batch_size=64"))
_8B_IN_HOST = dataclasses.replace(_8B, settings=(_WHOLE, "batch_size=8", _FEW_LAYERS))
_70B = _Base(model="llama", recipe="llama3_70b", settings=(_WHOLE, "batch_size=256"))
_LLAMA = (
    _8B.on(_IN_HOSTS, "8B, full"),
    _8B.on(_IN_HOSTS, "8B, dots", remat="dots"),
    _8B.on(_IN_HOSTS, "8B, auto", remat="auto"),
    _8B.on(_IN_HOSTS, "8B, full, zero2", reshard_after_forward=False),
    _8B.on(_IN_HOSTS, "8B, full, hpz", reshard_after_forward=8),
    _8B.on(_IN_HOSTS, "8B, full, hsdp", mesh={"replica": 8, "fsdp": 8}),
    _8B.on(_IN_HOSTS, "8B, full, 8 microbatches", "accumulate=8", "batch_size=512"),
    _8B.on(_IN_HOSTS, "8B, full, tensor 2", mesh={"tensor": 2}),
    _8B.on(_IN_HOSTS, "8B, dots, tensor 8", "batch_size=16", mesh={"tensor": 8}, remat="dots"),
    _8B.on(_IN_HOSTS, "8B, full, context 2", mesh={"context": 2}),
    _8B.on(_IN_HOSTS, "8B, dots, context 4, tensor 2", "batch_size=16", mesh={"context": 4, "tensor": 2}, remat="dots"),
    _8B.on(_IN_HOSTS, "8B, full, pipe 2", mesh={"pipe": 2}),
    _8B_IN_HOST.on(_IN_A100, "8 layers of 8B, full"),
    _8B_IN_HOST.on(_IN_HOST, "8 layers of 8B, none", "sequence_length=4096", remat="none"),
    _8B_IN_HOST.on(_IN_HOST, "8 layers of 8B, full, plain attention", _XLA),
    _8B_IN_HOST.on(_IN_HOST, "8 layers of 8B, full, unrolled", _UNROLLED),
    _8B_IN_HOST.on(_IN_HOST, "8 layers of 8B, dots, tensor 4", mesh={"tensor": 4}, remat="dots"),
    _70B.on("h100:32x8", "70B, full"),
    _70B.on("h100:32x8", "70B, full, tensor 8", "batch_size=64", mesh={"tensor": 8}),
)

# ---- models/moe.py

_MIXTRAL = _Base(model="moe", recipe="mixtral_8x7b", settings=(_WHOLE, "batch_size=64", _FEW_LAYERS))
_DEEPSEEK = _Base(model="moe", recipe="deepseek_moe_16b", settings=(_WHOLE, "batch_size=64", _FEW_LAYERS))
_MOE = (
    _MIXTRAL.on(_IN_HOSTS, "8 layers of Mixtral, full"),
    _MIXTRAL.on(_IN_HOSTS, "8 layers of Mixtral, full, expert 8", mesh={"expert": 8}),
    _MIXTRAL.on(_IN_HOSTS, "8 layers of Mixtral, dots, expert 8", mesh={"expert": 8}, remat="dots"),
    _MIXTRAL.on(_IN_HOSTS, "8 layers of Mixtral, full, tensor 2", mesh={"tensor": 2}),
    _MIXTRAL.on(_IN_HOSTS, "8 layers of Mixtral, none, 2048 tokens", "sequence_length=2048", remat="none"),
    _MIXTRAL.on(_IN_HOSTS, "8 layers of Mixtral, full, plain attention", _XLA),
    _MIXTRAL.on(_IN_HOSTS, "8 layers of Mixtral, full, no token dropped", "model.capacity=0"),
    _DEEPSEEK.on(_IN_HOSTS, "8 layers of DeepSeekMoE, full"),
    _DEEPSEEK.on(_IN_HOSTS, "8 layers of DeepSeekMoE, dots, expert 8", mesh={"expert": 8}, remat="dots"),
)

# ---- models/t5.py

_611M = _Base(model="t5", recipe="t5_611m", settings=("batch_size=256",))
_2B = _Base(model="t5", recipe="t5_2b", settings=("batch_size=2048",))
_T5 = (
    _611M.on(_IN_HOST, "611M, full"),
    _611M.on(_IN_HOST, "611M, dots", remat="dots"),
    _611M.on(_IN_HOST, "611M, none", remat="none"),
    _611M.on(_IN_A100, "611M, full, plain attention", _XLA),
    _611M.on(_IN_HOST, "4 layers of 611M, full, unrolled", _UNROLLED, "model.n_layer=4"),
    _2B.on(_IN_HOSTS, "2B, full"),
    _2B.on(_IN_HOSTS, "2B, dots", remat="dots"),
    _2B.on(_IN_HOSTS, "2B, full, plain attention", _XLA),
    _2B.on(_IN_HOSTS, "2B, full, zero2, 2 microbatches", "accumulate=2", reshard_after_forward=False),
)

# ---- models/linen_gpt.py, in float32

_LINEN_124M = _Base(
    model="linen_gpt",
    recipe="tiny",
    settings=(
        "batch_size=64",
        "sequence_length=1024",
        "model.vocab_size=50304",
        "model.block_size=1024",
        "model.n_layer=12",
        "model.n_head=12",
        "model.d_model=768",
    ),
)
_LINEN = (
    _LINEN_124M.on(_IN_HOST, "124M"),
    _LINEN_124M.on(_IN_HOST, "124M, full", remat="full"),
    _LINEN_124M.on(_IN_HOST, "124M, dots", remat="dots"),
)

# ---- models/vdit.py

_DIT = _Base(model="vdit", recipe="dit_xl_2")
_4B = _Base(model="vdit", recipe="vdit_4b", settings=("batch_size=128",))
_VDIT = (
    _DIT.on(_IN_HOST, "DiT-XL/2, full"),
    _DIT.on(_IN_HOST, "DiT-XL/2, dots", remat="dots"),
    _DIT.on(_IN_A100, "DiT-XL/2, none", remat="none"),
    _DIT.on(_IN_HOST, "8 layers of DiT-XL/2, auto, unrolled", _UNROLLED, _FEW_LAYERS, remat="auto"),
    _4B.on(_IN_HOSTS, "4B, full", "batch_size=512"),
    _4B.on(_IN_HOSTS, "4B, dots", remat="dots"),
    _4B.on(_IN_HOSTS, "4B, full, plain attention", _XLA),
)

# ---- models/resnet.py and models/dhen.py

_RESNET_50 = _Base(model="resnet", recipe="resnet50")
_REGNET_9B = _Base(model="resnet", recipe="regnet_9b", settings=("batch_size=1024",))
_DHEN_550M = _Base(model="dhen", recipe="dhen_550m")
_OTHERS = (
    _RESNET_50.on(_IN_HOST, "ResNet-50", "batch_size=1024"),
    _RESNET_50.on(_IN_HOST, "ResNet-50, full", "batch_size=1024", remat="full"),
    _RESNET_50.on(_IN_HOSTS, "ResNet-50, 64 GPUs"),
    _REGNET_9B.on(_IN_HOSTS, "RegNet 9B, full"),
    _DHEN_550M.on(_IN_64_HOSTS, "DHEN 550M"),
)

# ---- those of the case `grid`


def _of_grid() -> Iterator[Configuration]:
    """Yields jshard's programs of the grid."""
    for cell in cells_of(quick=False, clusters=GPUS):
        if cell.system != JSHARD or cell.options != FASTEST:
            continue
        request = cell.request
        assert request.recipe is not None
        yield Configuration(
            name=f"{cell.model}, of the grid, {cell.cluster}, sums in {cell.reduce_dtype}",
            model=Path(request.model).stem,
            recipe=request.recipe,
            topology=cell.cluster,
            settings=request.settings,
            mesh=request.mesh,
            units=request.units,
        )


FULL: tuple[Configuration, ...] = (*_GPT, *_LLAMA, *_MOE, *_T5, *_LINEN, *_VDIT, *_OTHERS, *_of_grid())
QUICK = (_124M.on("h100:1x2", "two blocks", *SMALL, "batch_size=8"),)
