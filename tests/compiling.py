"""How tests compile: most of what they cost is compiling, so machine code that is slow and soon made will do."""

import importlib.metadata

XLA_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if importlib.metadata.version("jaxlib").startswith("0.10."):
    # Emits in half the time. XLA ends the process at a flag that it does not know, and later ones do not know this.
    XLA_FLAGS += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
